"""Complete steps on all GPUs of this machine, in each mode of `runtime.xla`.

Each mode is a part, in a process with a time limit: a mode that never ends is reported by its name. On a
CPU with `--small` there are two logical devices, and the modes that require GPUs report why.
"""

from collections.abc import Callable
import time
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import models, variants
from benchmarks.gpu import devices
from benchmarks.gpu.parts import Report
import ctl
from ctl.hardware import selection
from ctl.hardware.strategies import StrategyOptions

STEPS = 20
LAUNCHES = 10_000
_SECONDS = 3.0  # of a window


class Digits(models.Mnist):
    """The network of experiments/mnist.py on a part of its images."""

    def arrays(self):
        count = 6000 if devices.GPU else 512
        return tuple(array[:count] for array in super().arrays())


def measure(xla: str) -> Callable[[Report], None]:
    """Returns the part of a mode."""

    def run(report: Report) -> None:
        if not devices.GPU:
            devices.split(2)
        for name in ("mirrored", "multi_worker_mirrored"):
            with report.attempt(f"{name}, {xla}"):
                _measure(report, name, xla)

    return run


off, gradients, step, loop = map(measure, ("off", "gradients", "step", "loop"))


def _measure(report: Report, name: str, xla: str) -> None:
    if not devices.GPU and xla in ("step", "loop"):
        report(f"{name}, {xla}", skipped="XLA compiles the steps of several replicas on GPUs only")
        return
    if name == "mirrored":
        strategy = selection.build(name, StrategyOptions()).strategy
    else:  # of one worker
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    batch = 32 if report.small else 256 * replicas
    reference = _make(tf.distribute.OneDeviceStrategy(f"{devices.KIND}:0"), "off", batch)
    before = reference.model.get_weights()
    reference.train(tf.constant(STEPS))
    trainer = _make(strategy, xla, batch)
    start = time.perf_counter()
    trainer.train(tf.constant(1))
    first_step = time.perf_counter() - start
    trainer.train(tf.constant(STEPS - 1))
    difference = _difference(trainer, reference, before)
    evaluator = ctl.StandardEvaluator(trainer)
    threads = [_count_threads()]
    trainer.train(tf.constant(STEPS))
    evaluated = evaluator.evaluate(tf.constant(-1))  # between two loops
    trainer.train(tf.constant(STEPS))
    speed = _measure_speed(trainer, batch)
    launches = 20 if report.small else LAUNCHES
    for _ in range(launches if xla == "loop" else 1):
        trainer.train(tf.constant(1 if xla == "loop" else launches))
    threads.append(_count_threads())
    report(
        f"{name}, {xla}",
        replicas=replicas,
        first_step_seconds=round(first_step, 2),
        examples_per_second=round(speed),
        difference=difference,
        evaluation=float(evaluated["loss"]),
        launches=launches,
        threads=threads,
        **({} if difference < 1e-2 else {"error": "the weights are not those of one device"}),
    )


def _make(strategy: tf.distribute.Strategy, xla: str, batch: int) -> variants.Trainer:
    return variants.Trainer(
        Digits(batch=batch),
        dropout=0.0,
        strategy=strategy,
        optimizer=lambda: tf_keras.optimizers.SGD(0.05),
        options=ctl.TrainerOptions(xla=xla),
    )


def _difference(trainer: Any, reference: Any, before: list[np.ndarray]) -> float:
    """Returns the largest difference of a variable, relative to its change, by the Euclidean norm."""
    weights = (each.model.get_weights() for each in (trainer, reference))
    return max(
        float(np.linalg.norm(own - other) / np.linalg.norm(other - old))
        for own, other, old in zip(*weights, before, strict=True)
    )


def _measure_speed(trainer: Any, batch: int) -> float:
    """Returns the examples per second of a window."""
    steps, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < _SECONDS:
        trainer.train(tf.constant(STEPS))
        steps += STEPS
    return steps * batch / seconds


def _count_threads() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
