"""Measures, watches and checks the inner loops of a run."""

from collections.abc import Iterator, Mapping
import contextlib
import math
import time
from typing import Any

import orbit

from ctl.errors import Failure, UsageError
from ctl.hardware import strategies
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.reporter import Reporter, as_numbers, without_nan
from ctl.loop.step_summaries import StepSummaries
from ctl.loop.stragglers import WorkerTimes
from ctl.loop.watchdog import Watchdog
from ctl.replica.step.engine import engine_of
from ctl.trainer import StandardTrainer


class LoopMonitor:
    """Measures, watches and checks inner loops, and reports skipped and repeated steps.

        with monitor.measure(100):
            outputs = monitor.read(trainer.train(tf.constant(100)))
        monitor.check(100, steps=100, outputs=outputs)

    Args:
        trainer: runs the steps.
        reporter: measures the speed, and records skipped and repeated steps.
        summaries: writes the training summaries.
        step_summaries: decides when `tf.summary` calls in a step are written.
        watchdog: reports loops that hang.
    """

    def __init__(
        self,
        trainer: StandardTrainer,
        reporter: Reporter,
        *,
        summaries: orbit.utils.SummaryManager,
        step_summaries: StepSummaries,
        watchdog: Watchdog | None = None,
    ):
        self._trainer = trainer
        self._reporter = reporter
        self._summaries = summaries
        self._step_summaries = step_summaries
        self._results = engine_of(trainer).step.results
        self._results.measure_waiting()
        self._watch = watchdog.loop if watchdog else lambda step: contextlib.nullcontext()

    @contextlib.contextmanager
    def measure(self, steps: int) -> Iterator[None]:
        """Measures and watches the `with` block, which runs `steps` steps and reads their outputs.

        The caller calls the trainer, so that this class adds no frame to the user's tracebacks.
        """
        first, reporter = int(self._trainer.global_step.numpy()), self._reporter
        # The profiler comes first, so that the time in which it writes does not count as steps.
        with reporter.profiler.profile(first, first + steps):
            self._results.input_wait.reset()  # a failed loop may leave its time here
            self._results.reduction_wait.reset()
            begin = time.perf_counter()
            with (
                reporter.clock.measure("steps"),
                reporter.summary_writer(self._summaries),
                self._step_summaries.recording(),
                self._watch(first),
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
        throughput = self._reporter.throughput
        gathered = processes.gather([throughput.last_seconds, waited, waiting or 0.0])
        times = [WorkerTimes(*values) for values in gathered]
        throughput.add_input_wait(max(each.input for each in times))
        if waiting is not None:
            self._reporter.add_worker_times(processes.members, times)

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
        trainer, reporter = self._trainer, self._reporter
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
