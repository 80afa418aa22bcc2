"""Fixtures of the checks' tests."""

import functools

import pytest

from ctl.modes.check.outcome import PASS
from tests.modes.check import planted

TWO_REPLICAS = {"runtime.strategy": "mirrored", "runtime.logical_devices": 2}


@pytest.fixture
def make_factory(tmp_path, monkeypatch):
    """Makes the TrainerFactory of the correct experiment: make_factory(body, **{key: value})."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(planted.make_factory, tmp_path)


@pytest.fixture
def make_user_factory(tmp_path, monkeypatch):
    """Makes the TrainerFactory of a trainer of user_trainers.py: make_user_factory("Gan", **keys)."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(planted.make_user_factory, tmp_path)


@pytest.fixture(scope="session")
def correct_factories(tmp_path_factory):
    """The correct experiment's factories on 1 and 2 replicas, built once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("correct")
        patch.chdir(folder)
        factories = [planted.make_factory(folder, **keys) for keys in ({}, TWO_REPLICAS)]
    return [(factory, folder) for factory in factories]


@pytest.fixture(params=[0, 1], ids=["one replica", "two replicas"])
def correct_factory(request, correct_factories, monkeypatch):
    """The correct experiment's factory, in its own folder."""
    factory, folder = correct_factories[request.param]
    monkeypatch.chdir(folder)
    return factory


@pytest.fixture
def assert_passes(correct_factory):
    """Asserts that a check passes on the correct experiment, with nothing to fix."""

    def run(check):
        outcome = check(correct_factory)
        assert (outcome.verdict, outcome.fix) == (PASS, ""), outcome

    return run


@pytest.fixture
def assert_detects(make_factory):
    """Asserts the verdict and the observation of a check when a trainer has planted methods."""

    def run(body, check, verdict, observation):
        outcome = check(make_factory(body))
        assert outcome.verdict == verdict and observation in outcome.observation, outcome
        assert outcome.fix

    return run
