"""Prints, logs and records the progress of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import pathlib
import resource
import sys
from typing import Any

import numpy as np
import orbit
import tensorflow as tf
import tf_keras

from ctl.configs.group_values import patterns
from ctl.data.mixing import Mixture
from ctl.hardware import devices, gpu
from ctl.loop.checkpoints.files import report_write_errors
from ctl.loop.metric_log import MetricLog
from ctl.loop.profiler import Profiler
from ctl.loop.progress import Progress
from ctl.loop.stragglers import Stragglers, WorkerTimes
from ctl.loop.timing import Throughput, WallClock
from ctl.replica.arithmetic import precision
from ctl.replica.arithmetic.gradients import optimizers_of
from ctl.replica.measure.non_finite import NonFiniteReport
from ctl.replica.step.engine import engine_of
from ctl.replica.updates.part import LAYERS
from ctl.trainer import StandardTrainer


class Reporter:
    """Reports to the user's screen, to the log of metrics, and to events.jsonl.

    Args:
        trainer: the trainer.
        progress: prints the lines; by default nothing is printed.
        on_event: called as on_event(name, step, **fields).
        checkpoint_folder: where the run saves, for the message if the summaries cannot be
            written.
        metrics: passes the logged values to the writers; by default it has none.
        steps_per_epoch: steps in which every training example is read once; None if not known.
        clock: divides the time of the process among its activities.
        profiler: profiles some of the inner loops; by default none.

    Attributes:
        throughput: the speed of the loops.
    """

    def __init__(
        self,
        trainer: StandardTrainer,
        *,
        progress: Progress | None = None,
        on_event: Callable[..., None] | None = None,
        checkpoint_folder: pathlib.Path | None = None,
        metrics: MetricLog | None = None,
        steps_per_epoch: float | None = None,
        clock: WallClock | None = None,
        profiler: Profiler | None = None,
    ):
        self.profiler = profiler or Profiler()
        self._trainer = trainer
        self._steps_per_epoch = steps_per_epoch
        self.clock = clock or WallClock()
        self.metrics = metrics or MetricLog(
            checkpoint_folder=checkpoint_folder, print_line=self.print_line
        )
        self.throughput = Throughput(batch=trainer.global_batch_size)
        self._progress = progress or Progress(total=0, write=lambda line: None)
        self._on_event = on_event or (lambda *_, **__: None)
        self._on_gpu = _on_gpu(trainer.strategy)
        self._checkpoint_folder = checkpoint_folder
        self._stragglers: Stragglers | None = None  # known once several processes are measured
        self._worker_numbers: dict[str, float] = {}

    def print_line(self, line: str) -> None:
        """Prints a line, if this process prints."""
        self._progress.print_line(line)

    def record(self, event: str, step: int, **fields: Any) -> None:
        """Records an event."""
        # Only this record shows the next process of a killed run how the time was used.
        seconds = {"seconds": self.seconds()} if event == "checkpoint" else {}
        self._on_event(event, step, **fields, **seconds)

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
        measured = measure_loop(self._trainer, self.throughput)
        self._log("train", step, {**outputs, **rate, **measured, **usage, **self._worker_numbers})
        self._progress.trained(
            step,
            {**{name: v for name, v in outputs.items() if name != LAYERS}, **usage},
            examples_per_second=speed,
            last_examples_per_second=self.throughput.last_examples_per_second,
            input_wait=self.throughput.input_wait,
            seconds_left=self.throughput.seconds_for(last_step - step),
        )

    def add_worker_times(
        self, members: Sequence[tuple[str, str]], times: Sequence[WorkerTimes]
    ) -> None:
        """Logs the times of a loop in all processes, and reports slow ones; before `loop_ended`.

        Args:
            members: the name and the host of each process.
            times: the times of each process.
        """
        if self._stragglers is None:
            self._stragglers = Stragglers(members, record=self.record, print_line=self.print_line)
        self._worker_numbers = self._stragglers.numbers(times)
        self._stragglers.add(int(self._trainer.global_step.numpy()), times)

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
    return {
        name: as_numbers(value)
        if isinstance(value, Mapping)
        else orbit.utils.get_value(value).tolist()
        if tf.is_tensor(value)
        else value
        for name, value in outputs.items()
    }


def without_nan(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the outputs of a loop, as numbers, without values that are or contain NaN."""
    return {k: v for k, v in outputs.items() if not np.isnan(tf.nest.flatten(v)).any()}


# Checks the replicas, not the machine: a run that trains on the CPU does not use its GPUs.
def _on_gpu(strategy: tf.distribute.Strategy) -> bool:
    return any("GPU" in device for device in devices.replica_devices(strategy))


_GIB = 2**30
# Bytes on macOS, KiB elsewhere.
_RSS_UNIT = 1 if sys.platform == "darwin" else 2**10


def measure_loop(trainer: StandardTrainer, throughput: Throughput) -> dict[str, float]:
    """Returns learning rates, the last loop's speed and wait for input, peak memory, mixture counts.

    They cost microseconds per loop and nothing per step.

    Args:
        trainer: the trainer.
        throughput: the measured speed of the loop.
    """
    numbers = learning_rates(trainer)
    if throughput.last_examples_per_second:
        numbers["examples_per_second_last_loop"] = throughput.last_examples_per_second
        numbers["milliseconds_per_step"] = 1e3 * (throughput.last_seconds_per_step or 0.0)
    if throughput.input_wait is not None:
        numbers["input_wait"] = throughput.input_wait
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    numbers["peak_memory_gib"] = peak * _RSS_UNIT / _GIB
    for name, counts in count_examples(trainer, int(trainer.global_step.numpy())).items():
        numbers |= {f"{unit}/{name}": value for unit, value in counts.items()}
    return numbers | _read_device_memory(trainer.strategy)


def count_examples(trainer: StandardTrainer, step: int) -> dict[str, dict[str, float]]:
    """Counts the examples that each source of a `ctl.data.mixture` gave before a step.

    Args:
        trainer: the trainer.
        step: the global step.

    Returns:
        name -> {"examples": number of rows, "epochs": the same in epochs of the source}; {} for other
        data.
    """
    source = engine_of(trainer).pipeline.training_source()
    if not isinstance(source, Mixture):
        return {}
    return source.count_examples(step * trainer.global_batch_size, seed=trainer.options.seed)


def learning_rates(trainer: StandardTrainer) -> dict[str, float]:
    """Returns the learning rates of the next update: of the trainer, its groups and other optimizers.

    "learning_rate" belongs to `trainer.optimizer`, "learning_rate/PATTERN" to a group of
    `optimizer.groups`, and "learning_rate/ATTRIBUTE" to another optimizer of the trainer.
    """
    rates: dict[str, float] = {}
    for name, value in vars(trainer).items():
        optimizer = value.inner_optimizer if precision.has_loss_scale(value) else value
        if isinstance(optimizer, tf_keras.optimizers.Optimizer):
            rate = read_rate(optimizer)
            is_own = name.lstrip("_") == "optimizer"
            rates["learning_rate" if is_own else f"learning_rate/{name}"] = rate
    others = iter(optimizers_of(getattr(trainer, "optimizer", None))[1:])
    for group in trainer.options.optimizer_groups:
        other = next(others) if group.get("optimizer") is not None else None
        scale = group.get("learning_rate_scale") or (1.0 if other else None)
        if "learning_rate" in rates and scale:
            rate = read_rate(other) if other else rates["learning_rate"]
            rates[f"learning_rate/{','.join(patterns(group))}"] = rate * scale
    return rates


def read_rate(optimizer: Any) -> float:
    """Returns the learning rate of an optimizer's next update."""
    # Not the public property, which gives the rate of a schedule at the last update of this process.
    rate = optimizer._learning_rate
    return float(tf.convert_to_tensor(rate(optimizer.iterations) if callable(rate) else rate))


def _read_device_memory(strategy: tf.distribute.Strategy) -> dict[str, float]:
    """Returns the largest peak of TensorFlow's allocator on a GPU of the replicas."""
    peaks = []
    for device in devices.replica_devices(strategy):
        name = device[device.rfind("GPU:") :] if "GPU:" in device else ""
        if name:
            peaks.append(tf.config.experimental.get_memory_info(name)["peak"])
    return {"gpu_peak_memory_gib": max(peaks) / _GIB} if peaks else {}
