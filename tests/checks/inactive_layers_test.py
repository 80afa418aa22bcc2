"""Layers that a step calls as an evaluation does are named."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import one_batch

X = np.random.RandomState(0).randn(16, 3)
EXAMPLES = {"x": X, "label": X[:, :1]}


class Trainer(one_batch.Trainer):
    EXAMPLES = EXAMPLES
    package, frozen = tf_keras, False

    def build_model(self):
        layers = self.package.layers
        norm = layers.BatchNormalization(name="norm", trainable=not self.frozen)
        dropout = layers.Dropout(0.5, name="drop")
        return self.package.Sequential([layers.Dense(4), norm, dropout, layers.Dense(1)])

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum((batch["label"] - outputs) ** 2, axis=1)


class Forgets(Trainer):
    def forward(self, batch, training):
        return self.model(batch["x"])


class ForgetsInStep(Trainer):
    def replica_step(self, batch):
        return self.minimize(batch, lambda b: self.per_example_loss(b, self.model(b["x"])))


class ForgetsOne(Trainer):
    def build_model(self):
        model = super().build_model()
        model.build((None, 3))
        return model

    def forward(self, batch, training):
        dense, norm, dropout, last = self.model.layers
        return last(dropout(norm(dense(batch["x"])), training=training))


class OnPurpose(Trainer):
    """The layer is called with training=False in a functional model, as Keras' guide does."""

    def build_model(self):
        layers, inputs = tf_keras.layers, tf_keras.Input([3])
        inner = tf_keras.Sequential([layers.Dense(4), layers.BatchNormalization()])
        return tf_keras.Model(inputs, layers.Dense(1)(inner(inputs, training=False)))


class Centered(tf_keras.layers.Layer):
    """Moves a mean of its own, and has a constant."""

    def build(self, shape):
        self.center = self.add_weight("center", shape[-1:], trainable=False)
        self.constant = self.add_weight("constant", (), trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.center.assign(0.9 * self.center + tf.reduce_mean(inputs, axis=0))
        return inputs - self.center + self.constant


class OwnState(Trainer):
    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential([layers.Dense(4), Centered(name="centered"), layers.Dense(1)])


class ForgetsOwnState(Forgets):
    build_model = OwnState.build_model


class NoRate(Forgets):
    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential([layers.Dense(4), layers.Dropout(0.0), layers.Dense(1)])


@pytest.mark.parametrize(
    ("cls", "names", "options"),
    [
        (Trainer, [], {}),
        (Forgets, ["drop", "norm"], {}),
        (type("K3", (Forgets,), {"package": keras}), ["drop", "norm"], {}),
        (type("K3Right", (Trainer,), {"package": keras}), [], {}),
        (ForgetsInStep, ["drop", "norm"], {}),
        (ForgetsOne, ["norm"], {}),
        (type("Frozen", (Forgets,), {"frozen": True}), ["drop"], {}),
        (OnPurpose, [], {}),
        (NoRate, [], {}),
        (OwnState, [], {}),
        (ForgetsOwnState, ["centered"], {}),
        (Trainer, [], {"micro_batches": 2}),
        (Trainer, [], {"replicas": 2}),
        (Forgets, ["drop", "norm"], {"replicas": 2}),
    ],
)
def test_layers_that_never_train_are_named(cls, names, options, caplog):
    replicas = options.get("replicas", 1)
    options = {k: v for k, v in options.items() if k != "replicas"}
    one_batch.make(cls, 8, replicas, **options).train(tf.constant(2))
    lines = [r.getMessage() for r in caplog.records if "does not in this step" in r.getMessage()]
    assert len(lines) == bool(names)
    if names:
        assert lines[0].startswith(f"{', '.join(names)} would draw random numbers or update")
