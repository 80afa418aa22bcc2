"""--mode=eval and --mode=continuous_eval, called as functions."""

import functools
import json
import pathlib
import shutil

import pytest

from ctl.configs import overrides
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


@pytest.fixture
def best_arguments(make_arguments):
    """The arguments of a run of 20 steps whose best checkpoint is that of step 5."""
    make = functools.partial(
        make_arguments,
        {
            "train.steps": 20,
            "eval.interval": 5,
            "train.best.metric": "eval/loss",
            "train.best.mode": "max",
        },
    )
    assert train.train_and_eval(make()) == DONE
    return make


@pytest.mark.parametrize(
    ("name", "step"), [("best", 5), ("5", 5), ("10", 10), ("run/checkpoints/ckpt-10", 10)]
)
def test_eval_of_a_named_checkpoint_keeps_the_result_of_the_run(best_arguments, name, step):
    trained = experiments.read_result("run")
    assert trained["best"]["step"] == 5
    assert evaluate.evaluate(best_arguments(checkpoint=name)) == DONE
    result = experiments.read_result("run")
    entry = result.pop("checkpoint")
    assert result == trained
    assert entry["step"] == step and entry["eval"]["examples"] == 50
    if step == 5:
        assert entry["eval"]["loss"] == trained["best"]["value"]


def test_unknown_checkpoints_are_rejected_in_one_line(best_arguments):
    for name, message in {
        "7": r"--checkpoint=7: run has no checkpoint of this step, but of 5, 10, 20\.",
        "bset": r"--checkpoint is 'bset', but must be best, a step, or a checkpoint's path",
    }.items():
        with pytest.raises(UsageError, match=message):
            evaluate.evaluate(best_arguments(checkpoint=name))
    pathlib.Path("run/best/ckpt-5.data-00000-of-00001").write_bytes(b"")
    with pytest.raises(UsageError, match="run/best has no checkpoint: set train"):
        evaluate.evaluate(best_arguments(checkpoint="best"))
    with pytest.raises(UsageError, match=r"ckpt-5 cannot be read .*: name another --checkpoint"):
        evaluate.evaluate(best_arguments(checkpoint="run/best/ckpt-5"))


def test_continuous_eval_ends_with_the_last_checkpoint_of_a_run_that_an_action_has_ended(
    arguments,
):
    result = experiments.read_result("run")
    stopped = {"stopped": {"step": 20, "reason": "x"}}
    pathlib.Path("run/result.json").write_text(json.dumps(result | stopped))
    overrides.change(arguments.config, "train.steps", "60")
    assert evaluate.continuous_eval(arguments) == DONE


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
