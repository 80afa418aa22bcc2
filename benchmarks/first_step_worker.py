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
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks.first_step import KERAS_3, PLAIN, ROWS


def mnist(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )


def transformer(keras: Any) -> Any:
    layers = keras.layers
    x = inputs = layers.Input((64, 128))
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(y, y, use_causal_mask=True)])
        y = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(x))


def resnet50(keras: Any) -> Any:
    return keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None
    )


BUILD = {"mnist": mnist, "transformer": transformer, "resnet50": resnet50}
SHAPES = {"mnist": (28, 28, 1), "transformer": (64, 128), "resnet50": (32, 32, 3)}


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


def make_plain(build: Callable, arrays: tuple, replicas: int) -> tuple:
    """Returns the strategy, the step on all replicas, and the iterator of the custom loop."""
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

    data = strategy.experimental_distribute_dataset(dataset(arrays))
    return strategy, lambda iterator: strategy.run(replica_step, args=next(iterator)), data


def run_plain(build: Callable, arrays: tuple, replicas: int) -> None:
    _, step, data = make_plain(build, arrays, replicas)

    @tf.function
    def loop(iterator, steps):
        for _ in tf.range(steps):
            step(iterator)

    loop(iter(data), tf.constant(1))


def run_orbit(build: Callable, arrays: tuple, replicas: int) -> None:
    import orbit

    _, step, data = make_plain(build, arrays, replicas)

    class Trainer(orbit.StandardTrainer):
        def train_step(self, iterator):
            step(iterator)

    Trainer(data).train(tf.constant(1))


def run_fit(build: Callable, arrays: tuple, replicas: int) -> None:
    with make_strategy(replicas).scope():
        model = build()
        model.compile(adam(), tf_keras.losses.SparseCategoricalCrossentropy(True), ["accuracy"])
    model.fit(dataset(arrays), steps_per_epoch=1, verbose=0)


def make_strategy(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        cross_device_ops=tf.distribute.HierarchicalCopyAllReduce(),
    )


def dataset(arrays: tuple) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).repeat().batch(ROWS, drop_remainder=True)


RUN = {
    "ctl": run_ctl,
    KERAS_3: run_ctl,
    PLAIN: run_plain,
    "orbit": run_orbit,
    "tf_keras fit": run_fit,
}


def main(program: str, model: str, replicas: str) -> None:
    count = int(replicas)
    tf.get_logger().setLevel("ERROR")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
    )
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(64, *SHAPES[model])).astype(np.float32), rng.integers(0, 10, 64)
    keras = importlib.import_module("keras") if program == KERAS_3 else tf_keras
    build = functools.partial(BUILD[model], keras)
    RUN[program](build, arrays, count)
    end = time.monotonic()
    RUN[program](build, arrays, count)
    print(json.dumps([end, time.monotonic() - end]))


if __name__ == "__main__":
    main(*sys.argv[1:])
