"""Fixtures of the checks' tests."""

import functools

import pytest

from tests.modes.check import planted


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
def correct_experiment(tmp_path_factory):
    """The correct experiment's factory on two replicas, built once for all tests, and its folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("correct")
        patch.chdir(folder)
        return planted.make_factory(folder, **planted.TWO_REPLICAS), folder


@pytest.fixture
def correct_factory(correct_experiment, monkeypatch):
    """The correct experiment's factory, in its own folder."""
    factory, folder = correct_experiment
    monkeypatch.chdir(folder)
    return factory


@pytest.fixture
def assert_detects(make_factory):
    """Asserts the verdict and the observation of a check when a trainer has planted methods."""

    def run(body, check, verdict, observation):
        outcome = check(make_factory(body))
        assert outcome.verdict == verdict and observation in outcome.observation, outcome
        assert outcome.fix

    return run
