"""A process that measures one point of `benchmarks.growth`, and prints it as JSON.

python -m benchmarks.growth_worker PART PROGRAM SIZE
"""

from collections.abc import Callable
import json
import statistics
import sys
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

    def __init__(self, count: int):
        super().__init__()
        self.vectors = [
            self.add_weight(name=f"vector_{i}", shape=[WIDTH], initializer="ones")
            for i in range(count)
        ]

    def call(self, x):
        # Squares, because TensorFlow would compute equal gradients only once.
        return tf.add_n([tf.square(v * x) for v in self.vectors])


def make_ctl(count: int, strategy: tf.distribute.Strategy) -> Callable:
    """Returns the loop of a trainer."""

    class Trainer(ctl.StandardTrainer):
        def build_model(self):
            return tf_keras.Sequential([tf_keras.layers.Input((WIDTH,)), Sum(count)])

        def build_dataset(self, split, input_context):
            return ctl.data.arrays({"x": inputs()})

        def per_example_loss(self, batch, outputs):
            return tf.reduce_mean(tf.square(outputs), axis=1)

    return Trainer(strategy=strategy, global_batch_size=ROWS, optimizer=adam).train


def make_plain(count: int, strategy: tf.distribute.Strategy) -> Callable:
    """Returns a hand-written loop."""
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Input((WIDTH,)), Sum(count)])
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

    return loop


def adam() -> tf_keras.optimizers.Optimizer:
    return tf_keras.optimizers.Adam(1e-3)


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=[64, WIDTH]).astype(np.float32)


MAKE = {"ctl": make_ctl, "hand-written": make_plain}


def main(part: str, program: str, size: str) -> None:
    """Prints the seconds until the first step is done, and the milliseconds of a later one.

    Both are processor time, which other programs hardly change.
    """
    tf.get_logger().setLevel("ERROR")
    number = int(size)
    count, replicas = (20, number) if part == "replicas" else (number, 1)
    testing.split_cpu(replicas)
    strategy = testing.make_strategy(replicas)
    start = time.process_time()
    loop = MAKE[program](count, strategy)
    loop(tf.constant(1))
    first = time.process_time() - start
    times = []
    for _ in range(5):
        start = time.process_time()
        loop(tf.constant(STEPS))
        times.append((time.process_time() - start) / STEPS)
    print(json.dumps({"first": first, "step": 1000 * statistics.median(times)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
