"""The end of training: what a killed or interrupted process leaves to the next call."""

import pathlib

import pytest

import ctl
from tests.modes.shared import STOPPING, Killed, Killing, Stopping
from tests.support import experiments

KEYS = {**STOPPING, "train.steps": 30, "eval.interval": 10}
PATIENT = {"train.best.patience": 100}


@pytest.fixture
def make(make_arguments):
    """Makes a run of the tiny experiment with early stopping, in the folder "run"."""

    def build(keys=(), *actions):
        config = make_arguments(KEYS | dict(keys)).config
        return ctl.Run(config, "run", print_lines=False, actions=actions)

    return build


def kill(*_):
    raise Killed


@pytest.mark.slow
def test_run_that_was_killed_before_its_end_ends_in_the_next_call(make, monkeypatch):
    keys = PATIENT | {"train.export": "best"}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("ctl.loop.actions.action.ActionList.end", kill)  # before the export
        make(keys).train()
    with make(keys) as run:
        assert run.step == 30 and not pathlib.Path("run/export").exists()
        run.evaluate()
    with make(keys) as run:  # an evaluation does not make the run complete
        assert run.step == 30
        run.train()
        assert run.step == 10  # the best checkpoint
    result = experiments.read_result("run")
    assert result["step"] == 30 and result["best"]["restored"]
    assert result["eval"]["loss"] == result["best"]["value"]
    with make(keys) as run:
        run.train()
        assert run.step == 10
    assert [event for event, _ in experiments.read_events("run")].count("export") == 1


def test_interrupt_at_the_last_step_leaves_the_end_to_the_next_call(make):
    interrupt = Stopping(30)
    run = make(PATIENT, interrupt)
    run.train()
    assert run.step == 30 and not pathlib.Path("run/result.json").exists()
    interrupt.step = 35
    run.train()
    assert run.step == 10 and experiments.read_result("run")["best"]["restored"]
    run.train(steps=10)  # the same if training is continued after its end
    assert run.step == 35 and experiments.read_result("run")["step"] == 30
    run.train()
    assert run.step == 10 and experiments.read_result("run")["step"] == 35


def test_early_stopping_in_a_call_of_evaluate_leaves_the_end_to_the_next_call_of_train(make):
    run = make((), Stopping(15))  # so that step 15 is not evaluated
    run.train(steps=10)
    run.train()
    run.evaluate()
    assert run.step == 15 and "has not improved" in run.stop_reason
    assert "stopped" not in experiments.read_result("run")
    run.train()
    assert run.step == 10
    result = experiments.read_result("run")
    assert result["step"] == result["stopped"]["step"] == 15 and result["best"]["restored"]


def test_result_of_a_run_that_was_killed_before_it_has_the_values_of_its_training(make):
    keys = PATIENT | {"train.best.restore": False}
    with pytest.raises(Killed):
        make(keys, Killing()).train()
    outputs = experiments.read_notes("run", 30)["outputs"]
    assert outputs["loss"] > 0 and not pathlib.Path("run/result.json").exists()
    with make(keys) as run:
        run.train()
    assert experiments.read_result("run")["train"] == outputs
