"""Devices and folders for every test.

TensorFlow fixes its devices at first use, so each test process has four logical CPUs from the start;
a test that needs other ones runs a child process (tests/child.py).
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

from ctl import testing
from ctl.hardware import strategies

names = testing.split_cpu(4)
assert len(tf.config.list_logical_devices("CPU")) == len(names)  # and now they are fixed
tf.get_logger().setLevel("ERROR")


@pytest.fixture
def strategy():
    """Makes the strategy of a number of replicas: strategy(4)."""

    def build(replicas: int) -> tf.distribute.Strategy:
        name = "one_device" if replicas == 1 else "mirrored"
        return strategies.build(name, strategies.Request(logical_devices=replicas)).strategy

    return build
