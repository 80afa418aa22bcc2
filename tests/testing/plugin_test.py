"""The fixtures that pytest finds once ctl is installed, as a person's own tests use them."""

import subprocess
import sys

import pytest

from tests import child

THEIRS = """
import time

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing

SEEN = []


def test_nothing_loads_tensorflow_early(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("ctl")


def test_the_cpu_is_split(ctl_logical_devices):
    assert ctl_logical_devices(2) == ["CPU:0", "CPU:1"]
    assert len(tf.config.list_logical_devices("CPU")) == 4
    assert ctl_logical_devices(4)[3] == "CPU:3"
    with pytest.raises(ctl.UsageError, match="started already, with 4 logical CPUs and not 5"):
        ctl_logical_devices(5)


def test_each_strategy_trains_alike(ctl_strategy, ctl_tiny_trainer):
    trainer = ctl_tiny_trainer(ctl_strategy, global_batch_size=6, precision="float64")
    trainer.train(tf.constant(2))
    kernel = trainer.model.trainable_variables[0]
    for copy in testing.copies(trainer.strategy, kernel):
        SEEN.append(copy)
        np.testing.assert_allclose(copy, SEEN[0], rtol=0, atol=1e-12)


def test_the_workdir_is_empty(ctl_workdir):
    assert not ctl_workdir.has_run() and ctl_workdir.result() == {}


def test_time_stands_still(ctl_frozen_time):
    start = time.monotonic()
    time.sleep(100)
    ctl_frozen_time.advance(20)
    assert time.monotonic() - start == 120
    assert time.time() == time.perf_counter() == ctl_frozen_time.now


def test_time_goes_on_after_a_test_that_froze_it():
    start = time.monotonic()
    time.sleep(0.01)
    assert 0 < time.monotonic() - start < 50


@pytest.mark.parametrize("replica", [0, 1])
def test_a_planted_overflow_is_of_one_replica_and_one_step(
    ctl_logical_devices, ctl_tiny_trainer, replica
):
    devices = [f"/{name}" for name in ctl_logical_devices(2)]
    strategy = tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
    trainer = ctl_tiny_trainer(strategy, on_non_finite="skip")
    testing.plant(trainer, float("inf"), replica=replica, step=1)
    trainer.train(tf.constant(3))
    assert trainer.skipped_steps.numpy() == 1
    assert trainer.optimizer.iterations.numpy() == 2
    with pytest.raises(ctl.UsageError, match="has trained already"):
        testing.plant(trainer, replica=0)
    with pytest.raises(ctl.UsageError, match="There is no replica 2"):
        testing.plant(ctl_tiny_trainer(strategy), replica=2)
"""


def pytest_run(folder, *arguments):
    (folder / "theirs_test.py").write_text(THEIRS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        [*command, "theirs_test.py"],
        cwd=folder,
        env=child.environment(),
        capture_output=True,
        text=True,
        timeout=290,
    )


@pytest.mark.slow
def test_fixtures_work_where_ctl_is_installed(tmp_path):
    done = pytest_run(tmp_path)
    assert "11 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_fixtures_work_under_xdist(tmp_path):
    done = pytest_run(tmp_path, "-n", "2", "--dist", "loadfile")
    assert "11 passed" in done.stdout, done.stdout


def test_the_plugin_loads_no_tensorflow():
    script = "import sys, ctl.testing, ctl.testing.plugin; print('tensorflow' in sys.modules)"
    assert child.run(["-c", script]).stdout.strip() == "False"
