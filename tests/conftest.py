"""Splits the CPU of each test process into four logical devices, and configures hypothesis.

TensorFlow fixes its devices at first use, so this happens before any test. A test that requires other
devices runs a child process (tests/support/child.py).
"""

import gc
import os
import random
import signal
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# pytest's own processes inherit it: with an arena per thread, malloc keeps more freed memory.
os.environ.setdefault("MALLOC_ARENA_MAX", "1")
# By default hypothesis writes a cache, .hypothesis, into the checkout.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.devnull)

import hypothesis
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import context
import tf_keras

from ctl import testing
from ctl.data import distribution
from ctl.replica.graphs import custom_gradients

# A shell lets its background jobs ignore SIGINT, which tests send, and their child processes, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

devices = testing.split_cpu(4)
assert len(tf.config.list_logical_devices("CPU")) == len(devices)  # initializes the devices
tf.get_logger().setLevel("ERROR")
# The first trainer of a process calls it, but tests trace functions before that.
custom_gradients.free_with_their_graphs()

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

hypothesis.settings.register_profile(
    "default", derandomize=True, database=None, deadline=None, max_examples=450,
    report_multiple_bugs=False, suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
hypothesis.settings.register_profile(
    "long", hypothesis.settings.get_profile("default"), derandomize=False, max_examples=5_000,
)  # fmt: skip
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def seed():
    """Makes the initial weights of a test independent of the tests before it."""
    tf_keras.utils.set_random_seed(0)


def pytest_collection_finish():
    """Excludes what was imported from the garbage collections, which would visit it each time."""
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
