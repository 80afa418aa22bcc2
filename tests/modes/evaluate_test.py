"""--mode=eval and --mode=continuous_eval, called as functions."""

import pathlib
import shutil

import pytest

from ctl.errors import UsageError
from ctl.loop.checkpoints.checkpointer import Checkpointer, DamagedCheckpoint
from ctl.modes import DONE, STOPPED, evaluate, train
from tests import experiments


@pytest.fixture
def arguments(make_arguments):
    """The arguments of a run of 20 steps that has trained, with checkpoints at 10 and 20."""
    arguments = make_arguments({"train.steps": 20})
    assert train.train(arguments) == DONE
    return arguments


def test_eval_adds_an_evaluation_to_the_result(arguments):
    trained = experiments.read_result("run")
    assert evaluate.evaluate(arguments) == DONE
    result = experiments.read_result("run")
    assert result["eval"]["examples"] == 50
    assert result | {"eval": None} == trained


def test_eval_without_a_checkpoint_is_rejected(arguments):
    shutil.rmtree("run/checkpoints")
    with pytest.raises(UsageError, match="run has no checkpoint to evaluate: train first"):
        evaluate.evaluate(arguments)


def test_eval_without_a_run_is_rejected(make_arguments):
    for mode in (evaluate.evaluate, evaluate.continuous_eval):
        with pytest.raises(UsageError, match="run has no run to evaluate"):
            mode(make_arguments())
    assert not pathlib.Path("run").exists()


def test_continuous_eval_evaluates_every_checkpoint(arguments):
    assert evaluate.continuous_eval(arguments) == DONE
    evaluations = [event for event in experiments.read_events("run") if event[0] == "eval"]
    assert evaluations == [("eval", 10), ("eval", 20)]


def test_continuous_eval_skips_a_checkpoint_that_is_deleted_meanwhile(arguments, monkeypatch):
    restore = Checkpointer.restore

    def delete_first(self, path):
        if path.endswith("ckpt-10"):
            raise DamagedCheckpoint(path)
        restore(self, path)

    monkeypatch.setattr(Checkpointer, "restore", delete_first)
    assert evaluate.continuous_eval(arguments) == DONE
    assert [event for event in experiments.read_events("run") if event[0] == "eval"] == [
        ("eval", 20)
    ]


def test_continuous_eval_stops_on_a_signal_while_it_waits(arguments, monkeypatch):
    requested = iter([False, False, True, True, True])
    monkeypatch.setattr(
        "ctl.loop.stop.StopRequest.requested", property(lambda self: next(requested))
    )
    shutil.rmtree("run/checkpoints")
    assert evaluate.continuous_eval(arguments) == STOPPED
