"""Complete steps on all GPUs of this machine, in each mode of `runtime.xla`.

Each mode is a part, in a process with a time limit: a mode that never ends is reported by its name. On a
CPU with `--small` there are two logical devices, and the modes that require GPUs report why.
"""

from collections.abc import Callable
import time

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks.gpu import devices
from benchmarks.gpu.parts import Report
import ctl
from ctl.hardware import selection
from ctl.hardware.strategies import StrategyOptions

STEPS = 20
LAUNCHES = 10_000
_L = tf_keras.layers
_SECONDS = 3.0  # of a window


class Trainer(ctl.StandardTrainer):
    """The network of experiments/mnist.py on random images, without dropout."""

    def build_model(self):
        layers = [_L.Conv2D(32, 3, activation="relu"), _L.MaxPooling2D()]
        layers += [_L.Conv2D(64, 3, activation="relu"), _L.MaxPooling2D(), _L.Flatten()]
        layers += [_L.Dense(128, activation="relu"), _L.Dense(10)]
        return tf_keras.Sequential([_L.Input((28, 28, 1)), *layers])

    def build_dataset(self, split, input_context):
        draw = np.random.default_rng(0)
        x = draw.random([6000 if devices.GPU else 512, 28, 28, 1], np.float32)
        return ctl.data.arrays({"x": x, "label": draw.integers(0, 10, len(x)).astype(np.int32)})

    def per_example_loss(self, batch, outputs):
        loss = tf_keras.losses.sparse_categorical_crossentropy
        return loss(batch["label"], outputs, from_logits=True)

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}


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


def _make(strategy: tf.distribute.Strategy, xla: str, batch: int) -> Trainer:
    return Trainer(
        strategy=strategy,
        global_batch_size=batch,
        optimizer=lambda: tf_keras.optimizers.SGD(0.05),
        options=ctl.TrainerOptions(xla=xla),
    )


def _difference(trainer: Trainer, reference: Trainer, before: list[np.ndarray]) -> float:
    """Returns the largest difference of a variable, relative to its change, by the Euclidean norm."""
    return max(
        float(np.linalg.norm(own - other) / np.linalg.norm(other - old))
        for own, other, old in zip(
            trainer.model.get_weights(), reference.model.get_weights(), before, strict=True
        )
    )


def _measure_speed(trainer: Trainer, batch: int) -> float:
    """Returns the examples per second of a window."""
    steps, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < _SECONDS:
        trainer.train(tf.constant(STEPS))
        steps += STEPS
    return steps * batch / seconds


def _count_threads() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
