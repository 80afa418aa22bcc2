"""Measures, watches and checks the inner loops of a run."""

from collections.abc import Iterator, Mapping
import contextlib
import time
from typing import Any

import orbit

from ctl.hardware.collectives import ProcessGroup
from ctl.loop import loop_checks
from ctl.loop.reporter import Reporter, as_numbers, without_nan
from ctl.loop.step_summaries import StepSummaries
from ctl.loop.stragglers import WorkerTimes
from ctl.loop.watchdog import Watchdog
from ctl.replica.step.engine import engine_of
from ctl.trainer import StandardTrainer


class InnerLoop:
    """Measures, watches and checks inner loops, and reports skipped and repeated steps.

        with inner_loop.measure(100):
            outputs = inner_loop.read(trainer.train(tf.constant(100)))
        inner_loop.check(0, 100, outputs)

    Args:
        trainer: runs the steps.
        reporter: measures the speed, and records skipped and repeated steps.
        summaries: writes the training summaries.
        summary_interval: steps between two writes of `tf.summary` calls in a step.
        summary_seconds: if not 0, seconds between them instead.
        watchdog: reports loops that hang.
    """

    def __init__(
        self,
        trainer: StandardTrainer,
        reporter: Reporter,
        *,
        summaries: orbit.utils.SummaryManager,
        summary_interval: int,
        summary_seconds: float = 0.0,
        watchdog: Watchdog | None = None,
    ):
        self._trainer = trainer
        self._reporter = reporter
        self._summaries = summaries
        self._step_summaries = StepSummaries(
            trainer,
            interval=summary_interval,
            seconds=summary_seconds,
            print_line=reporter.print_line,
        )
        self._results = engine_of(trainer).step.results
        self._results.measure_waiting()
        self._watch = watchdog.loop if watchdog else lambda step: contextlib.nullcontext()

    @contextlib.contextmanager
    def measure(self, steps: int) -> Iterator[None]:
        """Measures and watches the `with` block, which runs `steps` steps and reads their outputs.

        The caller calls the trainer, so that this class adds no frame to the user's tracebacks.
        """
        first = int(self._trainer.global_step.numpy())
        # The profiler comes first, so that the time in which it writes does not count as steps.
        with self._reporter.profiler.profile(first, first + steps), self._measure(first, steps):
            yield

    @contextlib.contextmanager
    def _measure(self, first: int, steps: int) -> Iterator[None]:
        self._results.input_wait.reset()  # a failed loop may leave its time here
        self._results.reduction_wait.reset()
        begin = time.perf_counter()
        with (
            self._reporter.clock.measure("steps"),
            self._reporter.summary_writer(self._summaries),
            self._step_summaries.recording(),
            self._watch(first),
        ):
            yield
        self._reporter.throughput.add(steps, seconds=time.perf_counter() - begin)

    def boundary(self, step: int, boundary: int) -> int:
        """Returns the end of a loop from `step` on: `boundary`, or where a profile begins or ends."""
        return self._reporter.profiler.boundary(step, boundary)

    def read(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the outputs of the loop as numbers; waits for the devices to compute them."""
        numbers = as_numbers(outputs)
        # Means over no step are NaN, which is not valid in result.json.
        has_steps = not self._results.skipped_all()
        return numbers if has_steps else without_nan(numbers)

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

    def check(self, first: int, boundary: int, outputs: Mapping[str, Any]) -> None:
        """Checks a loop that has ended, and reports skipped and repeated steps.

        Args:
            first: the step at which it began.
            boundary: the step at which it should end.
            outputs: its loss and metrics, as numbers.

        Raises:
            Failure: the loss is not finite.
            UsageError: the trainer does not count its steps.
        """
        trainer, reporter = self._trainer, self._reporter
        last = int(trainer.global_step.numpy())
        repeated = loop_checks.count_repeated_steps(trainer, last, boundary)
        if repeated:
            reporter.record("repeated", last, steps=repeated)
        if trainer.non_finite_report:
            reporter.steps_skipped(trainer.non_finite_report, steps=boundary - first)
        loop_checks.check_loss(trainer, last, outputs, reporter)
