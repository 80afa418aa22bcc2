"""--mode=eval and --mode=continuous_eval, called as functions."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
from unittest import mock

import pytest

import ctl
from ctl.configs import overrides
from ctl.errors import UsageError
from ctl.loop.checkpoints.checkpointer import Checkpointer, DamagedCheckpoint
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, STOPPED, evaluate, train
from tests.modes.shared import read_files
from tests.support import experiments


@pytest.fixture
def arguments(make_complete):
    """The arguments of a run of 20 steps that has trained, with checkpoints at 10 and 20."""
    return make_complete(train.train, {"train.steps": 20})


BEST = {"train.steps": 20, "eval.interval": 5} | {
    "train.best.metric": "eval/loss", "train.best.mode": "max"
}  # fmt: skip


@pytest.fixture
def best_arguments(make_arguments, make_complete):
    """The arguments of a run of 20 steps whose best checkpoint is that of step 5."""
    make_complete(train.train_and_eval, BEST)
    return functools.partial(make_arguments, BEST)


@pytest.mark.parametrize(("name", "step"), [("best", 5), ("run/checkpoints/ckpt-10", 10)])
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


def test_eval_reads_the_checkpoint_that_it_chose_if_a_run_deletes_it(best_arguments, monkeypatch):
    open_run = evaluate._open_run

    def open_late(arguments):
        run = open_run(arguments)
        CheckpointFiles("run/checkpoints").remove(10)
        return run

    monkeypatch.setattr(evaluate, "_open_run", open_late)
    assert evaluate.evaluate(best_arguments(checkpoint="10")) == DONE
    entry = experiments.read_result("run")["checkpoint"]
    assert (entry["step"], entry["path"]) == (10, "run/checkpoints/ckpt-10")
    path = "run/checkpoints/ckpt-20"
    pathlib.Path(f"{path}.index").write_bytes(b"0" * os.path.getsize(f"{path}.index"))
    with pytest.raises(UsageError, match=rf"^{path} cannot be read \((?!.*/tmp)"):
        evaluate.evaluate(best_arguments(checkpoint="20"))


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
    with pytest.raises(UsageError, match=r"ckpt-5 .*name another --checkpoint"):
        evaluate.evaluate(best_arguments(checkpoint="run/best/ckpt-5"))


def test_continuous_eval_ends_with_the_last_checkpoint_of_a_run_that_an_action_has_ended(arguments):
    result = experiments.read_result("run")
    stopped = {"stopped": {"step": 20, "reason": "x"}}
    pathlib.Path("run/result.json").write_text(json.dumps(result | stopped))
    overrides.change(arguments.config, "train.steps", "60")
    assert evaluate.continuous_eval(arguments) == DONE


def test_eval_without_a_run_or_a_checkpoint_is_rejected(make_arguments, make_complete):
    for mode in (evaluate.evaluate, evaluate.continuous_eval):
        with pytest.raises(UsageError, match="run holds no run: train first"):
            mode(make_arguments())
    assert not pathlib.Path("run").exists()
    arguments = make_complete(train.train, {"train.steps": 20})
    shutil.rmtree("run/checkpoints")
    with pytest.raises(UsageError, match=r"no checkpoint .*train first"):
        evaluate.evaluate(arguments)


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


SPLITS = {"eval.splits": "['eval', 'test']"}


@pytest.mark.slow
def test_several_splits_are_evaluated_before_and_after_training(make_arguments):
    keys = {**SPLITS, "train.best.metric": "eval/test/loss", "train.best.mode": "min"}
    keys["eval.before_training"] = "true"
    assert train.train_and_eval(make_arguments(keys)) == DONE
    events = [event for event in experiments.read_events("run") if event[0] == "eval"]
    assert events == [("eval", 0), ("eval", 10)]
    result = experiments.read_result("run")
    assert result["eval"].keys() == {"eval", "test"}
    assert result["eval"]["test"].keys() == {"loss", "accuracy", "examples"}
    assert result["best"]["value"] == result["eval"]["test"]["loss"]
    assert {p.name for p in pathlib.Path("run/summaries/eval").iterdir() if p.is_dir()} == {
        "eval", "test",
    }  # fmt: skip


def test_experiment_without_evaluation_data_is_trained(make_arguments):
    keys = {"eval.splits": "[]"}
    assert train.train_and_eval(make_arguments(keys)) == DONE
    result = experiments.read_result("run")
    assert result["step"] == 10 and result["eval"] is None
    assert train.train_and_eval(make_arguments(keys)) == DONE  # and is complete
    with pytest.raises(UsageError, match=r"eval\.splits is empty"):
        evaluate.evaluate(make_arguments(keys))


def test_eval_of_other_data_keeps_the_result_of_the_run(arguments, make_arguments):
    trained = experiments.read_result("run")
    events = experiments.read_events("run")
    shifted = experiments.DROPOUT.replace('"x": X,', '"x": X + len(self.options.data.dir),')
    experiments.write(".", {"experiment.py": shifted})
    keys = {"train.steps": 20, "data.dir": "elsewhere", "eval.splits": "['test']"}
    assert evaluate.evaluate(make_arguments(keys)) == DONE
    result = experiments.read_result("run")
    entry = result.pop("checkpoint")
    assert result == trained
    assert entry["changes"] == [
        "data.dir: '' -> 'elsewhere'", "eval.splits: ['eval'] -> ['test']"
    ]  # fmt: skip
    assert entry["step"] == 20 and entry["eval"]["examples"] == 50
    assert evaluate.evaluate(make_arguments({"train.steps": 20})) == DONE
    assert experiments.read_result("run")["eval"]["loss"] != entry["eval"]["loss"]
    events += [("checkpoint_eval", 20), ("eval", 20)]
    assert experiments.read_events("run") == events


def test_eval_with_another_model_requires_the_flag(arguments, make_arguments):
    keys = {"train.steps": 20, "model.dropout": "0.5", "optimizer.learning_rate": 0.5}
    words = r"\(model\.dropout: 0\.3 -> 0\.5\): .* only data.* may change, .*--allow_config_change"
    with pytest.raises(UsageError, match=words):
        evaluate.evaluate(make_arguments(keys))
    assert evaluate.evaluate(make_arguments(keys, allow_config_change=True)) == DONE
    assert experiments.read_result("run")["checkpoint"]["changes"] == ["model.dropout: 0.3 -> 0.5"]


@pytest.mark.slow
def test_eval_of_a_run_that_restored_its_best_checkpoint_evaluates_that(make_arguments):
    keys = {**BEST, "train.best.restore": True}
    assert train.train_and_eval(make_arguments(keys)) == DONE
    trained = experiments.read_result("run")
    assert trained["best"]["step"] == 5 and trained["step"] == 20
    assert evaluate.evaluate(make_arguments(keys)) == DONE
    assert experiments.read_result("run") == trained
    assert evaluate.evaluate(make_arguments(keys, checkpoint="20")) == DONE
    assert experiments.read_result("run")["checkpoint"]["step"] == 20


class Stop(ctl.Action):
    def __call__(self, outputs):
        print("called at", self.controller.step)
        self.request_stop("it was called")


def test_actions_run_in_an_evaluation_and_end_nothing(arguments, monkeypatch, capsys):
    results, write = [], Workdir.write_result
    monkeypatch.setattr(
        Workdir, "write_result", lambda self, result: [results.append(result), write(self, result)]
    )
    overrides.change(arguments.config, "actions", f"['{__name__}:Stop']")
    trained = experiments.read_result("run")
    capsys.readouterr()
    for mode, steps in ((evaluate.evaluate, [20]), (evaluate.continuous_eval, [10, 20])):
        assert mode(arguments) == DONE
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "called" in line] == [f"called at {s}" for s in steps]
    evaluations = [event for event in experiments.read_events("run") if event[0] == "eval"]
    assert evaluations == [("eval", 20), ("eval", 10), ("eval", 20)]
    # The run has ended: its result is not replaced by that of an earlier step.
    assert [result["step"] for result in results] == [20, 20]
    assert [result["eval"]["examples"] for result in results] == [50, 50]
    assert experiments.read_result("run") | {"eval": None} == trained


def test_eval_of_a_folder_that_can_only_be_read_prints_its_results(arguments, capsys, monkeypatch):
    before = read_files()
    with monkeypatch.context() as planted:
        planted.setattr("tempfile.TemporaryFile", mock.Mock(side_effect=OSError(30, "Read-only")))
        folder = Workdir("run", may_read=True)
    assert evaluate.evaluate(dataclasses.replace(arguments, workdir=folder)) == DONE
    out = capsys.readouterr().out
    assert "run cannot be written, so nothing is recorded there." in out
    assert "eval       20/20" in out and read_files() == before
