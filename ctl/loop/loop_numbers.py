"""Logs the learning rates, the speed, the memory and the mixture of the data with each inner loop."""

from collections.abc import Mapping
import resource
import sys
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.built import flops
from ctl.built.inner_loop import pipeline_of
from ctl.configs.group_values import patterns
from ctl.hardware import devices
from ctl.keras import precision
from ctl.keras.precision import Optimizer
from ctl.loop.actions.action import LoopAction
from ctl.loop.timing import Throughput
from ctl.trainer import StandardTrainer
from ctl.update.gradients import optimizers_of

_GIB = 2**30
# Bytes on macOS, KiB elsewhere.
_RSS_UNIT = 1 if sys.platform == "darwin" else 2**10


class LoopNumbers(LoopAction):
    """Adds the numbers to the record of each loop; the mixture and the operations to `result.json`."""

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Logs the numbers of the last loop."""
        trainer, reporter = self.controller.trainer, self.controller.reporter
        reporter.log_with_loop(measure_loop(trainer, reporter.throughput))

    def result(self) -> dict[str, Any]:
        """Returns the examples of each source of a mixture, and the operations of a step."""
        controller, trained = self.controller, self.controller.trained_step
        trainer, step = controller.trainer, controller.step if trained is None else trained
        sources = count_examples(trainer, step)
        result: dict[str, Any] = {"sources": sources} if sources else {}
        if controller.is_chief:  # and the share of the peak of the devices, where it is known
            result |= flops.measure(trainer, controller.reporter.throughput.examples_per_second)
        return result


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
    source = pipeline_of(trainer).training_source()
    if source is None:
        return {}
    return source.count_examples(step * trainer.global_batch_size, seed=trainer.options.seed)


def learning_rates(trainer: StandardTrainer) -> dict[str, float]:
    """Returns the learning rates of the next update: of the trainer, its groups and other optimizers.

    "learning_rate" belongs to `trainer.optimizer`, "learning_rate/PATTERN" to a group of
    `optimizer.groups`, and "learning_rate/ATTRIBUTE" to another optimizer of the trainer.
    """
    rates: dict[str, float] = {}
    for name, value in vars(trainer).items():
        optimizer = precision.inner(value)
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


def read_rate(optimizer: Optimizer) -> float:
    """Returns the learning rate of an optimizer's next update."""
    # Not the public property, which gives the rate of a schedule at the last update of this process.
    rate = optimizer._learning_rate
    return float(tf.convert_to_tensor(rate(optimizer.iterations) if callable(rate) else rate))


def _read_device_memory(strategy: tf.distribute.Strategy) -> dict[str, float]:
    """Returns the largest peak of TensorFlow's allocator on a GPU of the replicas."""
    gpus = [name for name in devices.replica_devices(strategy) if "GPU:" in name]
    read = tf.config.experimental.get_memory_info
    peaks = [read(name[name.rfind("GPU:") :])["peak"] for name in gpus]
    return {"gpu_peak_memory_gib": max(peaks) / _GIB} if peaks else {}
