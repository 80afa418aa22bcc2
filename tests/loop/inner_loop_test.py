"""One inner loop: what it returns, and what it reports apart from its outputs."""

import contextlib

import orbit
import pytest
import tensorflow as tf

from ctl import testing
from ctl.errors import Failure, NonFiniteStep, UsageError
from ctl.hardware import strategies
from ctl.loop.inner_loop import InnerLoop
from ctl.loop.reporter import Reporter
from ctl.replica.measure.non_finite import NonFiniteReport
from tests import reference_model


class Watch:
    """Records the loops that it watches."""

    def __init__(self):
        self.first_steps = []

    @contextlib.contextmanager
    def loop(self, step):
        self.first_steps.append(step)
        yield


def make(watchdog=None, **options):
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, **options)
    events = []
    reporter = Reporter(trainer, on_event=lambda name, step, **fields: events.append((name, step)))
    summaries = orbit.utils.SummaryManager(None, tf.summary.scalar, trainer.global_step)
    loop = InnerLoop(trainer, reporter, summaries=summaries, summary_interval=10, watchdog=watchdog)
    return trainer, loop, reporter, events


def run(trainer, loop, steps):
    first = int(trainer.global_step.numpy())
    with loop.measure(steps):
        outputs = loop.read(trainer.train(tf.constant(steps)) or {})
    loop.check(first, first + steps, outputs)
    return outputs


def test_loop_returns_numbers_and_its_speed_is_measured_after_the_first():
    watch = Watch()
    trainer, loop, reporter, events = make(watch)
    outputs = run(trainer, loop, 3)
    assert type(outputs["loss"]) is float and trainer.global_step.numpy() == 3
    assert reporter.throughput.examples_per_second is None
    run(trainer, loop, 2)
    assert trainer.global_step.numpy() == 5
    assert reporter.throughput.examples_per_second > 0
    assert watch.first_steps == [0, 3]
    assert events == []


def test_trainer_may_return_nothing(monkeypatch):
    trainer, loop, _, _ = make()
    monkeypatch.setattr(trainer, "train", lambda steps: trainer.global_step.assign_add(2) and None)
    assert run(trainer, loop, 2) == {}


def test_skipped_steps_are_recorded_and_their_mean_loss_is_removed():
    trainer, loop, _, events = make(precision="float16", loss_scale=1e30)
    assert run(trainer, loop, 2) == {"loss_scale": pytest.approx(1e30, rel=1), "skipped_steps": 2}
    assert events == []  # a loss scale that is too large is expected


def test_steps_that_the_trainer_reports_are_recorded():
    trainer, loop, _, events = make()
    outputs = run(trainer, loop, 2)
    trainer.non_finite_report = NonFiniteReport(step=1, tensor="the loss", count=1)
    loop.check(0, 2, outputs)
    assert events == [("non_finite", 1)]


def test_step_that_is_not_finite_is_left_to_the_caller(monkeypatch):
    def fail(steps):
        raise error

    error = NonFiniteStep.__new__(NonFiniteStep)
    trainer, loop, reporter, events = make()
    monkeypatch.setattr(trainer, "train", fail)
    with pytest.raises(NonFiniteStep):
        run(trainer, loop, 2)
    assert events == [] and reporter.throughput.examples_per_second is None


def test_loop_must_count_its_steps_and_may_repeat_some_only_with_a_coordinator(monkeypatch):
    trainer, loop, _, events = make()
    monkeypatch.setattr(trainer, "train", lambda steps: trainer.global_step.assign_add(5) and {})
    with pytest.raises(UsageError, match="A loop to step 3 ended at step 5"):
        run(trainer, loop, 3)
    monkeypatch.setattr(strategies, "strategy_name", lambda strategy: "parameter_server")
    run(trainer, loop, 3)
    assert events == [("repeated", 10)]


def test_loss_that_is_not_finite_ends_the_run(monkeypatch):
    def train(steps):
        trainer.global_step.assign_add(2)
        return {"loss": tf.constant(float("nan"))}

    trainer, loop, _, events = make()
    monkeypatch.setattr(trainer, "train", train)
    with pytest.raises(Failure, match="loop that ended at step 2 is nan"):
        run(trainer, loop, 2)
    assert events == [("non_finite", 2)]
