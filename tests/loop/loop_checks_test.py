"""Checks of a training loop that has ended."""

import types

import pytest

from ctl.errors import Failure, UsageError
from ctl.hardware import strategies
from ctl.loop import loop_checks


def make_trainer(policy="stop"):
    return types.SimpleNamespace(strategy=None, options=types.SimpleNamespace(on_non_finite=policy))


def test_loop_must_end_at_its_boundary():
    assert loop_checks.count_repeated_steps(make_trainer(), 30, 30) == 0
    for step in (29, 31):
        with pytest.raises(UsageError, match=f"A loop to step 30 ended at step {step}: train_step"):
            loop_checks.count_repeated_steps(make_trainer(), step, 30)


def test_coordinator_may_repeat_steps_but_not_skip_any(monkeypatch):
    monkeypatch.setattr(strategies, "strategy_name", lambda strategy: "parameter_server")
    assert loop_checks.count_repeated_steps(make_trainer(), 33, 30) == 3
    with pytest.raises(UsageError, match="ended at step 29"):
        loop_checks.count_repeated_steps(make_trainer(), 29, 30)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_loss_that_is_not_finite_ends_the_run_and_is_recorded(loss):
    events = []
    reporter = types.SimpleNamespace(record=lambda *args, **fields: events.append((args, fields)))
    with pytest.raises(Failure, match=f"The loss of the loop that ended at step 30 is {loss}"):
        loop_checks.check_loss(make_trainer(), 30, {"loss": loss}, reporter)
    assert events == [(("non_finite", 30), {"policy": "stop", "tensor": "the loss"})]


@pytest.mark.parametrize(
    ("policy", "outputs"),
    [
        ("stop", {"loss": 0.5}),
        ("stop", {}),
        ("stop", {"loss": "a"}),
        ("ignore", {"loss": float("nan")}),
    ],
)
def test_other_outputs_are_accepted(policy, outputs):
    loop_checks.check_loss(make_trainer(policy), 30, outputs, None)
