"""Fixtures of the modes' tests."""

import pytest

from ctl.configs import loading, overrides
from ctl.loop.workdir import Workdir
from ctl.modes import Arguments
from tests import experiments


@pytest.fixture
def make_arguments(tmp_path, monkeypatch):
    """Makes the arguments of a run of a tiny experiment: make_arguments({key: value}, **fields)."""
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})

    def make(keys=(), **fields):
        config = loading.load_config("experiment.py")
        for name, value in {"train.steps": 10, **dict(keys)}.items():
            overrides.change(config, name, str(value))
        return Arguments(config, "experiment.py", Workdir("run"), **fields)

    return make
