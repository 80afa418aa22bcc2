"""Fixtures of the modes' tests."""

import shutil

import pytest

from ctl.configs import loading, overrides
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, Arguments
from tests.support import experiments


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


@pytest.fixture(scope="session")
def complete_runs(tmp_path_factory):
    """The folder of the complete runs that `make_complete` has copied, and the name of each."""
    return tmp_path_factory.mktemp("complete"), {}


@pytest.fixture
def make_complete(make_arguments, complete_runs):
    """Makes the arguments of a run that is complete; each is trained once for all tests."""
    folder, names = complete_runs

    def make(mode, keys=()):
        arguments, key = make_arguments(keys), (mode, *dict(keys).items())
        if key in names:
            shutil.copytree(folder / names[key], "run")
        else:
            assert mode(arguments) == DONE
            names[key] = str(len(names))
            shutil.copytree("run", folder / names[key])
        return arguments

    return make
