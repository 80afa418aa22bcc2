"""One process of `benchmarks.first_step`: builds a program twice and runs the first step of each.

    python -m benchmarks.first_step_worker PROGRAM MODEL REPLICAS

It prints the time of the monotonic clock at the end of the first step, and the seconds of the second
trainer. Only the programs of ctl import ctl.
"""

from collections.abc import Callable
import functools
import importlib
import json
import sys
import time

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import models
from benchmarks.first_step import KERAS_3, PLAIN, ROWS

INPUTS = {
    "mnist": lambda draw: draw.random((64, 28, 28), np.float32),
    "transformer": lambda draw: draw.integers(0, 8192, (64, 64)).astype(np.int32),
}
NAMES = {"mnist": "mnist64", "transformer": "encoder128"}  # in benchmarks.models


def adam() -> tf_keras.optimizers.Optimizer:
    return tf_keras.optimizers.Adam(1e-3)


def cross_entropy(labels, outputs):
    return tf_keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)


def run_ctl(build: Callable, arrays: tuple, replicas: int) -> None:
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
    Trainer(strategy=strategy, global_batch_size=ROWS, optimizer=adam).train(tf.constant(1))


def run_plain(build: Callable, arrays: tuple, replicas: int) -> None:
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
    loop(iter(strategy.experimental_distribute_dataset(dataset)), tf.constant(1))


def make_strategy(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        cross_device_ops=tf.distribute.HierarchicalCopyAllReduce(),
    )


RUN = {"ctl": run_ctl, KERAS_3: run_ctl, PLAIN: run_plain}


def main(program: str, model: str, replicas: str) -> None:
    count = int(replicas)
    tf.get_logger().setLevel("ERROR")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
    )
    rng = np.random.default_rng(0)
    arrays = INPUTS[model](rng), rng.integers(0, 10, 64)
    keras = importlib.import_module("keras") if program == KERAS_3 else tf_keras
    build = functools.partial(models.MODELS[NAMES[model]].build, keras)
    RUN[program](build, arrays, count)
    end = time.monotonic()
    RUN[program](build, arrays, count)
    print(json.dumps([end, time.monotonic() - end]))


if __name__ == "__main__":
    main(*sys.argv[1:])
