"""Splits the CPU of each test process into four logical devices.

TensorFlow fixes its devices at first use, so this happens before any test. A test that requires other
devices runs a child process (tests/support/child.py).
"""

import gc
import random
import subprocess
import time
import types

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import context
import tf_keras

from ctl import testing
from ctl.built import observers
from ctl.data import distribution
from ctl.hardware import strategies
from ctl.private import replaced
from ctl.testing import multiprocess
from ctl.update import non_finite
from tests.support import fork_server

devices = testing.split_cpu(4)
assert len(tf.config.list_logical_devices("CPU")) == len(devices)  # initializes the devices
tf.get_logger().setLevel("ERROR")
# The first trainer of a process calls it, but tests trace functions before that.
replaced.apply()

# Without tf.data's autotune thread in the datasets that tests make themselves: the deletion of an
# iterator can wait for its sleep of up to a minute (ctl/data/distribution.py). TensorFlow has no setting
# for a process; every iterator calls this method of its dataset.
dataset_ops.DatasetV2._apply_debug_options = distribution.disable_autotune


def set_seed(self, seed):
    """Replaces TensorFlow's method, which also clears the cache of compiled kernels.

    Each trainer sets the seed, so the functions that tests share would be optimized again each time.
    """
    self._seed, self._rng = seed, random.Random(seed)


context.Context._set_global_seed = set_seed

# Workers are forks of a process that has imported TensorFlow.
multiprocess.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": fork_server.Popen})


@pytest.fixture(autouse=True)
def seed():
    """Makes the initial weights of a test independent of the tests before it."""
    tf_keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def checks_that_fail(request, monkeypatch):
    """Makes a check of the user's code that fails itself an error, in place of a line."""
    if request.module.__name__ != "tests.built.observers_test":  # which tests the line
        monkeypatch.setattr(observers, "checked", lambda check, *arguments: check(*arguments))


@pytest.fixture
def small_window(monkeypatch):
    """A window of 11 losses instead of 101, so that a spike is recognized after 11 steps."""
    monkeypatch.setattr(non_finite, "WINDOW", 11)


@pytest.fixture
def pretend_strategy(monkeypatch):
    """Makes ctl treat every strategy as the one of a name in `STRATEGIES`."""
    return lambda name: monkeypatch.setattr(strategies, "strategy_name", lambda strategy: name)


def pytest_collection_finish(session):
    """Makes the tests faster.

    Graphs are optimized only with the slow tests: it takes a tenth of the time of the others. Garbage
    collections exclude what was imported, which they would visit each time.
    """
    is_slow = any(item.get_closest_marker("slow") for item in session.items)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not is_slow})
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def free_memory(request):
    """Frees what the tests of a file share and traced."""
    start = time.process_time()
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    context.context().clear_kernel_cache()
    if time.process_time() - start > 2:  # seconds; other files trace little
        gc.collect()
        gc.freeze()  # what is left stays, such as the registries of TensorFlow
