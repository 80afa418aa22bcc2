"""Runs that several tests of faults compare with."""

import os
import signal

import pytest

from ctl import main
from tests.support import experiments

EXPERIMENT = experiments.DROPOUT.replace(
    "eval=dict(interval=15)", "eval=dict(interval=15, global_batch_size=7)"
)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """A folder with experiment.py and its run without faults, `undisturbed`, of 30 steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    experiments.write(folder, {"experiment.py": EXPERIMENT})
    before = os.getcwd()
    os.chdir(folder)
    try:
        # In this process, which has imported TensorFlow already.
        assert main.run(["ctl", "--config=experiment.py", "--workdir=undisturbed"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def observe_signal():
    """Calls functions when SIGUSR1 arrives; returns the list of their results."""
    functions, results = [], []
    before = signal.signal(signal.SIGUSR1, lambda *_: results.extend(f() for f in functions))

    def observe(function):
        functions.append(function)
        return results

    yield observe
    signal.signal(signal.SIGUSR1, before)
