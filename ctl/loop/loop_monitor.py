"""Measures and checks the inner loops of a run, and writes their `tf.summary` values."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import math
import time
from typing import Any

import orbit
import tensorflow as tf

from ctl.built.inner_loop import plan_of, step_of
from ctl.errors import Failure, UsageError
from ctl.hardware import strategies
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.reporter import Reporter, as_numbers, without_nan
from ctl.loop.timing import Every, Timer
from ctl.trainer import StandardTrainer


class StepSummaries:
    """Writes the summaries of a step every few steps, or reports in one line why it cannot.

        summaries = StepSummaries(trainer, every=Every(100), print_line=print)
        with writer.as_default(), summaries.recording():
            trainer.train(tf.constant(250))         # written in the steps 0, 100 and 200

    The summaries come from the first replica, before the reduction. A step without `tf.summary`
    calls is traced into the same graph as without this class.

    Args:
        trainer: its `global_step` decides, so that a resumed run writes at the same steps.
        every: the steps between two summaries of the same name; or the seconds after which the
            summaries of the first step of an inner loop are written.
        print_line: prints the line about summaries that are not written.
    """

    def __init__(
        self, trainer: StandardTrainer, *, every: Every, print_line: Callable[[str], None]
    ):
        self._trainer = trainer
        self._interval = every.steps
        self._timer = Timer(every.seconds)
        # The step to write in; a variable, because the step is traced only once.
        self._step = tf.Variable(0, trainable=False, dtype=tf.int64) if every.seconds else None
        self._print_line = print_line
        self._reason = _why_not(trainer)
        self._dropped = self._reported = False

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
    xla = plan_of(trainer).xla
    fix = "call tf.summary in an action or in train_loop_end"
    # XLA has no operation that writes to a file. Under autocluster these operations stay outside.
    if xla in ("loop", "step", "gradients"):
        return f"runtime.xla={xla} compiles it: choose runtime.xla=off, or {fix}"
    spec = strategies.spec_of(trainer.strategy)
    if spec.remote:
        runs = "the workers of parameter servers run" if spec.coordinated else "a TPU runs"
        return f"{runs} it: {fix}"
    return ""


@dataclasses.dataclass(eq=False)
class LoopMonitor:
    """Measures and checks inner loops, and reports skipped and repeated steps.

        with monitor.measure(100):
            outputs = monitor.read(trainer.train(tf.constant(100)))
        monitor.check(100, steps=100, outputs=outputs)

    Args:
        trainer: runs the steps.
        reporter: measures the speed, and records skipped and repeated steps.
        summaries: writes the training summaries.
        step_summaries: decides when `tf.summary` calls in a step are written.
    """

    trainer: StandardTrainer
    reporter: Reporter
    _: dataclasses.KW_ONLY
    summaries: orbit.utils.SummaryManager
    step_summaries: StepSummaries

    def __post_init__(self) -> None:
        self._results = step_of(self.trainer).results
        self._results.measure_waiting()

    @contextlib.contextmanager
    def measure(self, steps: int) -> Iterator[None]:
        """Measures the `with` block, which runs `steps` steps and reads their outputs.

        The caller calls the trainer, so that this class adds no frame to the user's tracebacks.
        """
        reporter = self.reporter
        self._results.input_wait.reset()  # a failed loop may leave its time here
        self._results.reduction_wait.reset()
        begin = time.perf_counter()
        with (
            reporter.clock.measure("steps"),
            reporter.summary_writer(self.summaries),
            self.step_summaries.recording(),
        ):
            yield
        reporter.throughput.add(steps, seconds=time.perf_counter() - begin)

    def read(self, outputs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the outputs of the loop as numbers; waits for the devices to compute them."""
        numbers = as_numbers(outputs or {})
        # Means over no step are NaN, which is not valid in result.json.
        return without_nan(numbers) if self._results.skipped_all() else numbers

    def all_measure_waiting(self, processes: ProcessGroup) -> None:
        """Measures how long the last loop waited for batches and other processes; collective.

        In an all-reduce, all processes wait for the one whose batch is late, so the longest wait
        counts.
        """
        # All processes agree whether waits are measured: it depends on the trainer's class.
        waited, waiting = self._results.input_wait.read(), self._results.reduction_wait.read()
        if waited is None:
            return
        throughput = self.reporter.throughput
        gathered = processes.gather([throughput.last_seconds, waited, waiting or 0.0])
        throughput.add_input_wait(max(waited for _, waited, _ in gathered))
        if waiting is not None:
            self.reporter.process_seconds = gathered

    def check(self, boundary: int, *, steps: int, outputs: Mapping[str, Any]) -> None:
        """Checks a loop that has ended, and reports skipped and repeated steps.

        Args:
            boundary: the step at which it should end.
            steps: the number of its steps.
            outputs: its loss and metrics, as numbers.

        Raises:
            Failure: the loss is not finite although the trainer reported no such step.
            UsageError: the trainer does not count its steps.
        """
        trainer, reporter = self.trainer, self.reporter
        last = int(trainer.global_step.numpy())
        # A coordinator repeats steps of lost workers.
        if last > boundary and strategies.spec_of(trainer.strategy).coordinated:
            reporter.record("repeated", last, steps=last - boundary)
        elif last != boundary:
            raise UsageError(
                f"A loop to step {boundary} ended at step {last}: train_step must add 1 to "
                "self.global_step."
            )
        if trainer.non_finite_report:
            reporter.steps_skipped(trainer.non_finite_report, steps=steps)
        # A user's own `replica_step`, or a parameter server, may apply updates that are not checked.
        loss, policy = outputs.get("loss"), trainer.options.on_non_finite
        if policy != "ignore" and isinstance(loss, float) and not math.isfinite(loss):
            reporter.record("non_finite", last, policy="stop", tensor="the loss")
            raise Failure(
                f"The loss of the loop that ended at step {last} is {loss}. Nothing was saved since: "
                "lower the learning rate, clip the gradients, or continue with such losses by "
                "train.on_non_finite=ignore."
            )
