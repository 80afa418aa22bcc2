"""--mode=train and --mode=train_and_eval, called as functions."""

import json
import pathlib

import pytest

from ctl.errors import UsageError
from ctl.modes import DONE, STOPPED, train
from tests import experiments


def test_train_does_not_evaluate_and_train_and_eval_does(make_arguments):
    assert train.train(make_arguments()) == DONE
    assert experiments.read_result("run")["eval"] is None
    assert train.train_and_eval(make_arguments()) == DONE
    assert experiments.read_result("run")["eval"]["examples"] == 50


def test_run_killed_before_its_last_evaluation_only_evaluates(make_arguments):
    assert train.train_and_eval(make_arguments()) == DONE
    result = experiments.read_result("run")
    # As if killed in the last evaluation: the result is that of an earlier step.
    pathlib.Path("run/result.json").write_text(json.dumps(result | {"step": 5, "eval": None}))
    assert train.train_and_eval(make_arguments()) == DONE
    again = experiments.read_result("run")
    assert again["step"] == 10 and again["eval"] == result["eval"]
    assert again["train"] == result["train"]  # as the first process recorded it
    assert again["examples_per_second"] == result["examples_per_second"]


def test_complete_run_changes_nothing(make_arguments, capsys):
    train.train(make_arguments())
    before = {p: p.stat().st_mtime_ns for p in pathlib.Path("run").rglob("*") if p.is_file()}
    assert train.train(make_arguments()) == DONE
    assert "This run is complete: 10 steps" in capsys.readouterr().out
    after = {p: p.stat().st_mtime_ns for p in pathlib.Path("run").rglob("*") if p.is_file()}
    assert after == before


def test_rejected_checkpoint_leaves_the_config_of_the_run_as_it_was(make_arguments):
    train.train(make_arguments())
    before = pathlib.Path("run/config.json").read_text()
    changed = make_arguments({"optimizer.name": "sgd", "train.steps": 20}, allow_config_change=True)
    with pytest.raises(UsageError, match="does not match this trainer"):
        train.train(changed)
    assert pathlib.Path("run/config.json").read_text() == before
    assert not pathlib.Path("run/run.lock").exists()


def test_stop_that_is_requested_before_the_first_step_ends_after_the_first_loop(
    make_arguments, monkeypatch
):
    monkeypatch.setattr("ctl.loop.stop.StopRequest.requested", True)
    assert train.train_and_eval(make_arguments()) == STOPPED
    assert experiments.read_events("run") == [("start", 0), ("checkpoint", 5), ("stop", 5)]


def test_reason_of_a_stop_is_recorded(make_arguments, monkeypatch):
    from ctl.loop.stop import StopOnSignal

    enter = StopOnSignal.__enter__

    def enter_and_request(stop):
        enter(stop).request(signal="SIGTERM")
        return stop

    monkeypatch.setattr(StopOnSignal, "__enter__", enter_and_request)
    assert train.train(make_arguments()) == STOPPED
    last = json.loads(pathlib.Path("run/events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["signal"]) == ("stop", "SIGTERM")
