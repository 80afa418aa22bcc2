"""An inner loop is measured, watched and checked, and its outputs are numbers."""

import contextlib

import orbit
import pytest
import tensorflow as tf

from ctl.errors import Failure, NonFiniteStep, UsageError
from ctl.hardware import strategies
from ctl.loop.loop_monitor import LoopMonitor
from ctl.loop.step_summaries import StepSummaries
from ctl.replica.measure.non_finite import NonFiniteReport
from tests.loop.shared import Recording, make_reference, share


@share
def make_trainer(**options):
    return make_reference(**options)


class Monitored:
    """A trainer and its monitor, which records the events and the loops that are watched."""

    def __init__(self, **options):
        self.trainer = trainer = make_trainer(**options)
        self.reporter, self.watched = Recording(trainer), []
        self.monitor = LoopMonitor(
            trainer,
            self.reporter,
            summaries=orbit.utils.SummaryManager(None, tf.summary.scalar, trainer.global_step),
            step_summaries=StepSummaries(trainer, interval=10, print_line=print),
            watchdog=self,
        )

    @contextlib.contextmanager
    def loop(self, step):
        self.watched.append(step)
        yield

    def run(self, steps):
        boundary = int(self.trainer.global_step.numpy()) + steps
        with self.monitor.measure(steps):
            outputs = self.monitor.read(self.trainer.train(tf.constant(steps)))
        self.monitor.check(boundary, steps=steps, outputs=outputs)
        return outputs


def test_loop_returns_numbers_and_its_speed_is_measured_after_the_first():
    made = Monitored()
    outputs = made.run(3)
    assert type(outputs["loss"]) is float and made.trainer.global_step.numpy() == 3
    assert made.reporter.throughput.examples_per_second is None
    made.run(2)
    assert made.trainer.global_step.numpy() == 5
    assert made.reporter.throughput.examples_per_second > 0
    assert made.watched == [0, 3] and made.reporter.steps() == []


def test_steps_that_the_trainer_reports_are_recorded(monkeypatch):
    made = Monitored()
    monkeypatch.setattr(made.trainer, "non_finite_report", NonFiniteReport(1, "the loss", 1))
    made.monitor.check(0, steps=2, outputs={})
    assert made.reporter.steps() == [("non_finite", 1)]


def test_step_that_is_not_finite_is_left_to_the_caller(monkeypatch):
    def fail(steps):
        raise NonFiniteStep(NonFiniteReport(1, "the loss", 1), None)

    made = Monitored()
    monkeypatch.setattr(made.trainer, "train", fail)
    with pytest.raises(NonFiniteStep):
        made.run(2)
    assert made.reporter.steps() == [] and made.reporter.throughput.last_seconds == 0


def test_loop_must_count_its_steps_and_may_repeat_some_only_with_a_coordinator(monkeypatch):
    made = Monitored()
    monkeypatch.setattr(
        made.trainer, "train", lambda steps: made.trainer.global_step.assign_add(5) and None
    )
    assert made.run(5) == {}  # a trainer may return nothing
    for steps in (3, 6):
        with pytest.raises(UsageError, match=r"A loop to step \d+ ended at step \d+: train_step"):
            made.run(steps)
    monkeypatch.setattr(strategies, "strategy_name", lambda strategy: "parameter_server")
    made.run(3)
    assert made.reporter.steps() == [("repeated", 20)]
    with pytest.raises(UsageError, match="A loop to step 26 ended at step 25"):
        made.run(6)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_loss_that_is_not_finite_ends_the_run_and_is_recorded(loss):
    made = Monitored()
    with pytest.raises(Failure, match=f"The loss of the loop that ended at step 0 is {loss}"):
        made.monitor.check(0, steps=2, outputs={"loss": loss})
    assert made.reporter.steps() == [("non_finite", 0)]


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
    made = Monitored(on_non_finite=policy)
    made.monitor.check(0, steps=2, outputs=outputs)
    assert made.reporter.steps() == []
