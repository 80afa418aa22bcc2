"""Decides when the user's `tf.summary` calls in a training step are written."""

from collections.abc import Callable
import contextlib
from typing import Any

import tensorflow as tf

from ctl.hardware import strategies
from ctl.loop.timing import Timer
from ctl.replica.step.engine import engine_of
from ctl.trainer import StandardTrainer


class StepSummaries:
    """Writes the summaries of a step every few steps, or reports in one line why it cannot.

        summaries = StepSummaries(trainer, interval=100, print_line=print)
        with writer.as_default(), summaries.recording():
            trainer.train(tf.constant(250))         # written in the steps 0, 100 and 200

    The summaries come from the first replica, before the reduction. A step without `tf.summary`
    calls is traced into the same graph as without this class.

    Args:
        trainer: its `global_step` decides, so that a resumed run writes at the same steps.
        interval: steps between two summaries of the same name.
        print_line: prints the line about summaries that are not written.
        seconds: if not 0, write the summaries of the first step of an inner loop once this time has
            passed since the last ones, instead of by the interval.
    """

    def __init__(
        self,
        trainer: StandardTrainer,
        *,
        interval: int,
        print_line: Callable[[str], None],
        seconds: float = 0.0,
    ):
        self._trainer = trainer
        self._interval = interval
        self._timer = Timer(seconds)
        # The step to write in; a variable, because the step is traced only once.
        self._step = tf.Variable(0, trainable=False, dtype=tf.int64) if seconds else None
        self._print_line = print_line
        self._reason = _why_not(trainer)
        self._dropped = self._reported = False
        # Reported after the first loop, in which the step is traced.
        self._histograms_reported = not trainer.options.histogram_interval

    @contextlib.contextmanager
    def recording(self) -> Any:
        """Records summaries in the `with` block, which runs a training loop."""
        if self._step is not None and self._timer.is_due():
            self._step.assign(self._trainer.global_step.read_value())
            self._timer.restart()
        with tf.summary.record_if(self._should_record):
            yield
        if self._dropped and not self._reported:
            self._reported = True
            self._print_line(f"tf.summary calls in the step are not written: {self._reason}.")
        engine = engine_of(self._trainer)
        if not self._histograms_reported and not engine.step.update.has_histograms:
            why = engine.plan.histograms_obstacle or "the trainer's own step does not call minimize"
            self._print_line(
                f"summaries.histogram_interval writes no histograms of the gradients: {why}."
            )
        self._histograms_reported = True

    def _should_record(self) -> Any:
        """Returns whether a `tf.summary` call writes; called in traces and hooks of the trainer."""
        if tf.executing_eagerly():  # `train_loop_begin` and `train_loop_end` run once per loop
            return True
        if self._reason:
            self._dropped = True
            return False
        if self._step is not None:
            return tf.equal(self._trainer.global_step, self._step)
        return tf.equal(self._trainer.global_step % self._interval, 0)


def _why_not(trainer: StandardTrainer) -> str:
    """Returns why summaries in the step of a trainer cannot be written; "" if they can."""
    xla = engine_of(trainer).plan.xla
    fix = "call tf.summary in an action or in train_loop_end"
    # XLA has no operation that writes to a file. Under autocluster these operations stay outside.
    if xla in ("loop", "step", "gradients"):
        return f"runtime.xla={xla} compiles it: choose runtime.xla=off, or {fix}"
    spec = strategies.spec_of(trainer.strategy)
    if spec.remote:
        runs = "the workers of parameter servers run" if spec.coordinated else "a TPU runs"
        return f"{runs} it: {fix}"
    return ""
