"""A clock that the test sets, and the program on a tiny experiment."""

import types

import pytest

from ctl import main
from tests.support import experiments


@pytest.fixture
def clock(monkeypatch):
    """The time that `time.monotonic` returns: `clock.now`, which the test sets."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Runs the program on `experiment.py`; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})

    def run(*arguments):
        code = main.run(["ctl", "--config=experiment.py", *arguments])
        return (code, *capsys.readouterr())

    return run
