"""The fixtures that pytest finds when ctl is installed, used from another project's tests."""

import os

import pytest

from ctl.testing import plugin
from tests.support import child

USER_TESTS = """

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing

COPIES = []


@pytest.fixture
def strategy():
    return "a fixture of the user"


def test_plugin_is_installed_and_takes_no_common_names(pytestconfig, strategy):
    assert pytestconfig.pluginmanager.has_plugin("ctl")
    assert strategy == "a fixture of the user"


def test_cpu_is_split(ctl_logical_devices):
    assert ctl_logical_devices(2) == ["CPU:0", "CPU:1"]
    assert len(tf.config.list_logical_devices("CPU")) == 4
    assert ctl_logical_devices(4)[3] == "CPU:3"
    with pytest.raises(ctl.UsageError, match="initialized with 4 logical CPUs, but 5 are required"):
        ctl_logical_devices(5)


def test_each_strategy_trains_to_the_same_weights(ctl_strategy, ctl_tiny_trainer):
    trainer = ctl_tiny_trainer(ctl_strategy, global_batch_size=6, precision="float64")
    trainer.train(tf.constant(2))
    kernel = trainer.model.trainable_variables[0]
    for copy in testing.copies(trainer.strategy, kernel):
        COPIES.append(copy)
        np.testing.assert_allclose(copy, COPIES[0], rtol=0, atol=1e-12)


def test_workdir_is_empty(ctl_workdir):
    assert not ctl_workdir.has_run() and ctl_workdir.result() == {}
"""


def run_pytest(folder, *arguments):
    (folder / "user_test.py").write_text(USER_TESTS)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "user_test.py"]
    return child.run(command, cwd=folder)


@pytest.mark.slow
def test_fixtures_work_in_another_project(tmp_path):
    run = run_pytest(tmp_path)
    assert "7 passed" in run.stdout, run.stdout


@pytest.mark.slow
@pytest.mark.long
def test_fixtures_work_under_xdist(tmp_path):
    run = run_pytest(tmp_path, "-n", "2", "--dist", "loadfile")
    assert "7 passed" in run.stdout, run.stdout


@pytest.mark.parametrize("before", [None, "0"])
def test_option_that_records_ends_with_the_session(monkeypatch, before):
    monkeypatch.delenv("CTL_UPDATE_GOLDEN", raising=False)
    if before:
        monkeypatch.setenv("CTL_UPDATE_GOLDEN", before)
    config = pytest.Config.fromdictargs({}, ["--update_golden", "-p", "no:cacheprovider"])
    plugin.pytest_configure(config)
    assert os.environ["CTL_UPDATE_GOLDEN"] == "1"
    config._ensure_unconfigure()
    assert os.environ.get("CTL_UPDATE_GOLDEN") == before
