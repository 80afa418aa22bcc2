"""Prints, logs and records the progress of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
from typing import Any

import numpy as np
import orbit
import tensorflow as tf

from ctl.hardware import devices, gpu
from ctl.loop.checkpoints.files import report_write_errors
from ctl.loop.metric_log import MetricLog
from ctl.loop.progress import Progress
from ctl.loop.timing import Every, Throughput, WallClock
from ctl.loop.workdir import Workdir
from ctl.trainer import StandardTrainer
from ctl.update.non_finite import NonFiniteReport
from ctl.update.part import LAYERS


class Reporter:
    """Reports to the user's screen, to the log of metrics, and to events.jsonl.

    Args:
        trainer: the trainer.
        progress: prints the lines; by default nothing is printed.
        on_event: called as on_event(name, step, **fields).
        workdir: the folder of the run, if it has one.
        metrics: passes the logged values to the writers; by default it has none.
        steps_per_epoch: steps in which every training example is read once; None if not known.
        clock: divides the time of the process among its activities.
        summary_interval: when the `tf.summary` calls of a step are written: a number of steps, a time,
            such as "5 minutes", or an `Every`; by default once in each inner loop.

    Attributes:
        throughput: the speed of the loops.
        process_seconds: the duration of the last loop, its wait for input, and its wait for other
            processes, for each process; empty if they are not measured.
    """

    def __init__(
        self, trainer: StandardTrainer,
        *, progress: Progress | None = None, on_event: Callable[..., None] | None = None,
        workdir: Workdir | None = None, metrics: MetricLog | None = None,
        steps_per_epoch: float | None = None, clock: WallClock | None = None,
        summary_interval: int | str | Every = 0,
    ):  # fmt: skip
        self._trainer = trainer
        self._steps_per_epoch = steps_per_epoch
        self.clock = clock or WallClock()
        self.workdir = workdir
        self.summary_interval = Every.of(summary_interval)
        self._checkpoint_folder = workdir.checkpoints if workdir else None
        self.metrics = metrics or MetricLog(
            checkpoint_folder=self._checkpoint_folder, print_line=self.print_line
        )
        self.throughput = Throughput(batch=trainer.global_batch_size)
        self._progress = progress or Progress(total=0, write=lambda line: None)
        self._on_event = on_event or (lambda *_, **__: None)
        self._on_gpu = _on_gpu(trainer.strategy)
        self.process_seconds: Sequence[Sequence[float]] = ()
        self._loop_numbers: dict[str, float] = {}  # what actions have added

    def print_line(self, line: str) -> None:
        """Prints a line, if this process prints."""
        self._progress.print_line(line)

    def record(self, event: str, step: int, **fields: Any) -> None:
        """Records an event."""
        self._on_event(event, step, **fields)

    def seconds(self) -> dict[str, float]:
        """Returns how this process has used its time so far, in seconds by activity.

        "input" is the part of "steps" that was spent waiting for batches.
        """
        seconds = self.clock.read(compiling=self.throughput.compile_seconds)
        is_measured = self.throughput.input_wait is not None
        return seconds | ({"input": self.throughput.input_seconds} if is_measured else {})

    def loop_ended(self, step: int, outputs: Mapping[str, Any], *, last_step: int) -> None:
        """Reports the outputs of an inner loop.

        Args:
            step: the step at which it ended.
            outputs: its loss and metrics, as numbers.
            last_step: the step at which the run ends, for the time that is left.
        """
        # None until the second loop ends, since the first loop also traces and compiles.
        speed = self.throughput.examples_per_second
        # Read from the driver once per loop, when the devices have just finished.
        usage = gpu.read_usage() if self._on_gpu else {}
        rate = {"examples_per_second": speed} if speed else {}
        self._log("train", step, {**outputs, **rate, **usage, **self._loop_numbers})
        self._loop_numbers = {}
        shown = {**{name: v for name, v in outputs.items() if name != LAYERS}, **usage}
        self._progress.trained(step, shown, self.throughput, last_step=last_step)

    def log_with_loop(self, numbers: Mapping[str, float]) -> None:
        """Adds numbers to the record of the loop that has just ended, from an action."""
        self._loop_numbers |= numbers

    def steps_skipped(self, report: NonFiniteReport, *, steps: int) -> None:
        """Reports that updates of a loop of `steps` steps were skipped."""
        tensor, count = report.tensor, report.count
        self.record("non_finite", report.step, policy="skip", tensor=tensor, count=count)
        self.print_line(f"Skipped {count} of {steps} updates: step {report.step} {report}.")

    def evaluation_ended(self, step: int, outputs: Mapping[str, Any]) -> None:
        """Reports the outputs of an evaluation."""
        self._log("eval", step, outputs)
        self._progress.evaluated(step, outputs)
        self.record("eval", step, **outputs)

    @contextlib.contextmanager
    def summary_writer(
        self, summaries: orbit.utils.SummaryManager, *, flush: bool = False
    ) -> Iterator[None]:
        """Sets the default writer of the user's own summaries, for a loop or its actions.

        Args:
            summaries: owns the writer.
            flush: whether to write to the file at the end.
        """
        with self._report_write_errors():  # the first call creates the file
            writer = summaries.summary_writer()
        with writer.as_default():
            yield
        if flush:
            with self._report_write_errors():
                summaries.flush()

    def _log(self, split: str, step: int, values: Mapping[str, Any]) -> None:
        epoch = {"epoch": step / self._steps_per_epoch} if self._steps_per_epoch else {}
        self.metrics.write(split, step, {**epoch, **values})

    def _report_write_errors(self) -> contextlib.AbstractContextManager[None]:
        return report_write_errors("The summaries", self._checkpoint_folder)


def as_numbers(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Converts tensors to Python numbers; nested mappings stay nested."""
    return {name: _as_number(value) for name, value in outputs.items()}


def _as_number(value: Any) -> Any:
    if isinstance(value, Mapping):
        return as_numbers(value)
    return orbit.utils.get_value(value).tolist() if tf.is_tensor(value) else value


def without_nan(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the outputs of a loop, as numbers, without values that are or contain NaN."""
    return {k: v for k, v in outputs.items() if not np.isnan(tf.nest.flatten(v)).any()}


# Checks the replicas, not the machine: a run that trains on the CPU does not use its GPUs.
def _on_gpu(strategy: tf.distribute.Strategy) -> bool:
    return any("GPU" in device for device in devices.replica_devices(strategy))
