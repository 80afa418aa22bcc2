"""Models of Keras 3 and their twins in tf_keras, written once for both packages."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing

ROWS = 48


def convolutional(k, rate=0.3):
    """A functional model with everything that depends on the split of a batch."""
    inputs = k.Input((8, 8, 1))
    x = k.layers.Conv2D(3, 3, strides=2, kernel_constraint=k.constraints.NonNeg())(inputs)
    x = k.layers.BatchNormalization()(x)
    x = k.layers.Flatten()(k.layers.ReLU()(x))
    x = k.layers.Dropout(rate)(x)
    return k.Model(inputs, k.layers.Dense(4, kernel_regularizer=k.regularizers.L2(1 / 64))(x))


class Twin(ctl.StandardTrainer):
    """Trains `make(package)`; the subclass says with which package."""

    make = staticmethod(convolutional)
    package = keras
    shape = (8, 8, 1)

    def build_model(self):
        return self.make(self.package)

    def build_dataset(self, split, input_context):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(ROWS, *self.shape)) + rng.integers(0, 4, ROWS).reshape(
            [-1] + [1] * len(self.shape)
        )
        return ctl.data.arrays({"x": x, "label": rng.integers(0, 4, ROWS)})

    @staticmethod
    def inputs(x, dtype):
        return tf.cast(x, dtype)

    def preprocess(self, batch):
        return {**batch, "x": self.inputs(batch["x"], self.compute_dtype)}

    def per_example_loss(self, batch, outputs):
        return self.package.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_metrics(self):
        return {"accuracy": self.package.metrics.SparseCategoricalAccuracy()}


def make_trainer(
    package=keras, *, replicas=1, batch=7, cls=Twin, make=None, optimizer=None, strategy=None,
    **options,
):  # fmt: skip
    attributes = {"package": package} | ({"make": staticmethod(make)} if make else {})
    options.setdefault("precision", "float64")
    trainer = type(cls.__name__, (cls,), attributes)(
        strategy=strategy or testing.make_strategy(replicas),
        global_batch_size=batch,
        optimizer=optimizer or (lambda: tf_keras.optimizers.Adam(0.01)),
        options=ctl.TrainerOptions(**options),
    )
    with trainer.strategy.scope():
        initialize(trainer.model.weights)
    return trainer


def initialize(variables):
    """Assigns the same values in both packages."""
    rng = np.random.default_rng(1)
    for variable in variables:
        if "moving" not in variable.name:
            variable.assign(rng.normal(size=variable.shape) * 0.3)


def train(trainer, steps=10):
    """Trains, and returns the results and the weights."""
    results = trainer.train(tf.constant(steps))
    return {k: float(v) for k, v in results.items()}, [v.numpy() for v in trainer.model.weights]


def difference(one, two):
    return max(np.max(np.abs(a - b)) for a, b in zip(one, two, strict=True))
