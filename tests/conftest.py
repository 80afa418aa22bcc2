"""Devices and folders for every test.

TensorFlow fixes its devices at first use, so each test process has four logical CPUs from the start;
a test that needs other ones runs a child process (tests/child.py).
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# hypothesis caches what it reads in a folder .hypothesis: not in the checkout, nor anywhere else.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.devnull)

import hypothesis
import tensorflow as tf

from ctl import testing

names = testing.split_cpu(4)
assert len(tf.config.list_logical_devices("CPU")) == len(names)  # and now they are fixed
tf.get_logger().setLevel("ERROR")

hypothesis.settings.register_profile(
    "default", derandomize=True, database=None, deadline=None, max_examples=450,
    report_multiple_bugs=False, suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
hypothesis.settings.register_profile(
    "long", hypothesis.settings.get_profile("default"), derandomize=False, max_examples=5_000,
)  # fmt: skip
hypothesis.settings.load_profile("default")
