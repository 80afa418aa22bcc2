"""A process of `benchmarks.first_step` or `benchmarks.growth`: builds a program and runs its first step.

    python -m benchmarks.first_step_worker PROGRAM MODEL REPLICAS

MODEL is a name, or the number of variables of a sum with little to compute. Of a name it prints the time
of the monotonic clock at the end of the first step, and the seconds of a second trainer; of a sum the
seconds until the first step is done and those of a later one, in processor time, which other programs
hardly change. Only the programs of ctl import ctl.
"""

from collections.abc import Callable
import functools
import importlib
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import models
from benchmarks.first_step import KERAS_3, PLAIN, ROWS

NAMES = {"mnist": "mnist64", "transformer": "encoder128"}  # in benchmarks.models
INPUTS = {
    "mnist": lambda draw: draw.random((64, 28, 28), np.float32),
    "transformer": lambda draw: draw.integers(0, 8192, (64, 64)).astype(np.int32),
}
WIDTH = 64  # of a variable of a sum
STEPS = 100  # of the calls that are timed


def build_sum(count: int) -> tf_keras.Model:
    """A sum over variables."""

    class Sum(tf_keras.layers.Layer):
        def build(self, shape):
            self.vectors = [self.add_weight(f"v{i}", [WIDTH], None, "ones") for i in range(count)]

        def call(self, x):
            # Squares, because TensorFlow would compute equal gradients only once.
            return tf.add_n([tf.square(v * x) for v in self.vectors])

    return tf_keras.Sequential([tf_keras.layers.Input((WIDTH,)), Sum()])


def adam() -> tf_keras.optimizers.Optimizer:
    return tf_keras.optimizers.Adam(1e-3)


def cross_entropy(labels, outputs):
    return tf_keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)


def make_ctl(build: Callable, arrays: tuple, replicas: int) -> Callable:
    """Returns the loop of a trainer."""
    import ctl
    from ctl import testing

    class Trainer(ctl.StandardTrainer):
        def build_model(self):
            return build()

        def build_dataset(self, split, input_context):
            return ctl.data.arrays(dict(zip(("x", "label"), arrays, strict=True)))

        def per_example_loss(self, batch, outputs):
            return cross_entropy(batch["label"], outputs)

        def build_metrics(self):
            return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}

    strategy = testing.make_strategy(replicas) if replicas > 1 else None
    return Trainer(strategy=strategy, global_batch_size=ROWS, optimizer=adam).train


def make_plain(build: Callable, arrays: tuple, replicas: int) -> Callable:
    """Returns a hand-written loop."""
    strategy = make_strategy(replicas)
    with strategy.scope():
        model, optimizer = build(), adam()
        mean = tf_keras.metrics.Mean()
        accuracy = tf_keras.metrics.SparseCategoricalAccuracy()

    def replica_step(x, labels):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            losses = cross_entropy(labels, outputs)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=ROWS)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean.update_state(losses)
        accuracy.update_state(labels, outputs)

    @tf.function
    def loop(iterator, steps):
        for _ in tf.range(steps):
            strategy.run(replica_step, args=next(iterator))

    dataset = tf.data.Dataset.from_tensor_slices(arrays).repeat().batch(ROWS, drop_remainder=True)
    return functools.partial(loop, iter(strategy.experimental_distribute_dataset(dataset)))


def make_strategy(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        cross_device_ops=tf.distribute.HierarchicalCopyAllReduce(),
    )


def measure_growth(start: Callable[[], Callable]) -> dict[str, float]:
    """Returns the seconds until the first step is done, and the milliseconds of a later one."""
    begin = time.process_time()
    loop = start()
    first, times = time.process_time() - begin, []
    for _ in range(5):
        begin = time.process_time()
        loop(tf.constant(STEPS))
        times.append((time.process_time() - begin) / STEPS)
    return {"first": first, "step": 1000 * statistics.median(times)}


def measure_first_step(start: Callable[[], Callable]) -> list[float]:
    """Returns the time at the end of the first step, and the seconds of a second program."""
    start()
    end = time.monotonic()
    start()
    return [end, time.monotonic() - end]


def main(program: str, model: str, replicas: str) -> None:
    tf.get_logger().setLevel("ERROR")
    logical = [tf.config.LogicalDeviceConfiguration()] * int(replicas)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)
    draw = np.random.default_rng(0)
    build: Callable[[], Any]
    if model in NAMES:
        keras = importlib.import_module("keras") if program == KERAS_3 else tf_keras
        build = functools.partial(models.MODELS[NAMES[model]].build, keras)
        inputs = INPUTS[model](draw)
    else:
        build = functools.partial(build_sum, int(model))
        inputs = draw.normal(size=(64, WIDTH)).astype(np.float32)
    arrays = inputs, draw.integers(0, 10, 64)

    def start() -> Callable:
        make = make_plain if program == PLAIN else make_ctl
        loop = make(build, arrays, int(replicas))
        loop(tf.constant(1))
        return loop

    measure = measure_first_step if model in NAMES else measure_growth
    print(json.dumps(measure(start)))


if __name__ == "__main__":
    main(*sys.argv[1:])
