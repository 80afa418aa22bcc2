"""A process that measures one point of `benchmarks.growth`, and prints it as JSON.

python -m benchmarks.growth_worker PART PROGRAM SIZE
"""

from collections.abc import Callable
import json
import re
import statistics
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks.growth import ROWS, WIDTH
import ctl
from ctl import testing

STEPS = 100  # of the calls that are timed


class Sum(tf_keras.layers.Layer):
    """A sum over many variables, with little to compute."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.vectors = [
            self.add_weight(name=f"vector_{i}", shape=[width], initializer="ones")
            for i in range(count)
        ]

    def call(self, x):
        # Squares, because TensorFlow would compute equal gradients only once.
        return tf.add_n([tf.square(v[:WIDTH] * x) for v in self.vectors])


def make_ctl(count: int, width: int, strategy: tf.distribute.Strategy) -> tuple:
    """Returns the loop of a trainer, and a function that saves it to a folder and waits."""

    class Trainer(ctl.StandardTrainer):
        def build_model(self):
            return tf_keras.Sequential([tf_keras.layers.Input((WIDTH,)), Sum(count, width)])

        def build_dataset(self, split, input_context):
            return ctl.data.arrays({"x": inputs()})

        def per_example_loss(self, batch, outputs):
            return tf.reduce_mean(tf.square(outputs), axis=1)

    trainer = Trainer(strategy=strategy, global_batch_size=ROWS, optimizer=adam)

    def save(folder: str) -> None:
        checkpointer = ctl.Checkpointer(folder, trainer)
        checkpointer.save()
        checkpointer.close()

    return trainer.train, save


def make_plain(count: int, width: int, strategy: tf.distribute.Strategy) -> tuple:
    """Returns a hand-written loop, and a function that saves its model and optimizer to a folder."""
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Input((WIDTH,)), Sum(count, width)])
        optimizer = adam()
        optimizer.build(model.trainable_variables)

    def replica_step(x):
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(model(x, training=True)), axis=1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=ROWS)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    dataset = tf.data.Dataset.from_tensor_slices(inputs()).repeat().batch(ROWS, drop_remainder=True)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function
    def loop(steps):
        for _ in tf.range(steps):
            strategy.run(replica_step, args=(next(iterator),))

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    return loop, lambda folder: checkpoint.write(f"{folder}/checkpoint")


def adam() -> tf_keras.optimizers.Optimizer:
    return tf_keras.optimizers.Adam(1e-3)


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=[64, WIDTH]).astype(np.float32)


MAKE = {"ctl": make_ctl, "hand-written": make_plain}


def measure_step(make: Callable, count: int, replicas: int) -> dict[str, float]:
    """Returns the seconds until the first step is done, and the milliseconds of a later one.

    Both are processor time, which other programs hardly change.
    """
    strategy = testing.make_strategy(replicas)
    start = time.process_time()
    loop, _ = make(count, WIDTH, strategy)
    loop(tf.constant(1))
    first = time.process_time() - start
    times = []
    for _ in range(5):
        start = time.process_time()
        loop(tf.constant(STEPS))
        times.append((time.process_time() - start) / STEPS)
    return {"first": first, "step": 1000 * statistics.median(times)}


def measure_memory(make: Callable, steps: int) -> dict[str, float]:
    """Returns the memory that the steps after the first 100 add, in MiB."""
    loop, _ = make(10, WIDTH, tf.distribute.get_strategy())
    loop(tf.constant(100))
    before = anonymous_mib()
    for _ in range(steps // 100):
        loop(tf.constant(100))
    return {"memory": anonymous_mib() - before}


def measure_save(make: Callable, mib: int) -> dict[str, float]:
    """Returns the seconds in which weights of this size, with Adam's two slots, are saved."""
    width = max(WIDTH, mib * 2**20 // 4 // 10)
    loop, save = make(10, width, tf.distribute.get_strategy())
    loop(tf.constant(1))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        save(folder)
        return {"save": time.perf_counter() - start}


def anonymous_mib() -> float:
    with open("/proc/self/status", encoding="ascii") as file:
        return int(re.search(r"RssAnon:\s+(\d+) kB", file.read())[1]) / 1024


def main(part: str, program: str, size: str) -> None:
    tf.get_logger().setLevel("ERROR")
    make, number = MAKE[program], int(size)
    testing.split_cpu(number if part == "replicas" else 1)
    if part == "replicas":
        result = measure_step(make, 20, number)
    elif part == "variables":
        result = measure_step(make, number, 1)
    elif part == "steps":
        result = measure_memory(make, number)
    else:
        result = measure_save(make, number)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
