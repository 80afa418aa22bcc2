"""Configures hypothesis; tests/support/process.py has the fixtures of all tests."""

import os
import signal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# pytest's own processes inherit it: with an arena per thread, malloc keeps more freed memory.
os.environ.setdefault("MALLOC_ARENA_MAX", "1")
# By default hypothesis writes a cache, .hypothesis, into the checkout.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.devnull)

import hypothesis

# A shell lets its background jobs ignore SIGINT, which tests send, and their child processes, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile(
    "default", derandomize=True, database=None, deadline=None, max_examples=450,
    report_multiple_bugs=False, suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
hypothesis.settings.register_profile(
    "long", hypothesis.settings.get_profile("default"), derandomize=False, max_examples=5_000,
)  # fmt: skip
hypothesis.settings.load_profile("default")


def pytest_configure(config):
    """Imports TensorFlow only in a process that runs tests, not in the one that starts them."""
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("tests.support.process")
