"""Random layers of Keras 3 draw by (seed, layer, step, row) in a step, or are rejected."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.keras import models
from ctl.keras.dropout import key_random_layers
from ctl.replica import examples
from tests.keras.keras3 import twins

LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.4),
    "shared mask": lambda: keras.layers.Dropout(0.4, noise_shape=(None, 1, 3)),
    "spatial": lambda: keras.layers.SpatialDropout1D(0.4),
    "noise": lambda: keras.layers.GaussianNoise(1.0),
    "multiplied noise": lambda: keras.layers.GaussianDropout(0.4),
    "alpha": lambda: keras.layers.AlphaDropout(0.4),
    "recurrent": lambda: keras.layers.GRU(2, dropout=0.4, return_sequences=True),
    "attention": lambda: Attending(),
}
X = np.random.default_rng(0).normal(size=(7, 5, 3)).astype("float32")


class Attending(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.Attention(dropout=0.4)

    def call(self, x, training=False):
        return self.attention([x, x], training=training)


def draw(layer, first, last, step=3):
    rows = tf.constant(X[first:last])
    with examples(first_row=first, step=tf.constant(step, tf.int64), count=last - first):
        return models.adapt(layer)(rows, training=True).numpy()


@pytest.mark.parametrize("name", LAYERS)
def test_a_part_of_the_batch_gets_its_part_of_the_draws(name):
    keras.utils.set_random_seed(0)
    layer = LAYERS[name]()
    layer.build(X.shape)
    key_random_layers(models.adapt(layer), 1)
    complete = draw(layer, 0, 7)
    assert np.allclose(draw(layer, 0, 4), complete[:4], atol=1e-6)
    assert np.allclose(draw(layer, 4, 7), complete[4:], atol=1e-6)
    assert not np.allclose(draw(layer, 0, 7, step=4), complete, atol=1e-3)


def test_masks_are_those_of_the_layer_in_tf_keras():
    other = tf_keras.layers.Dropout(0.4)
    for layer in (models.adapt(keras.layers.Dropout(0.4)), other):
        key_random_layers(layer, 1)
    with examples(step=tf.constant(3, tf.int64), count=7):
        expected = other(tf.constant(X), training=True).numpy()
    layer = keras.layers.Dropout(0.4)
    key_random_layers(models.adapt(layer), 1)
    assert np.array_equal(draw(layer, 0, 7), expected)


def rejected(layer, match):
    class Own(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.held = keras.random.SeedGenerator(1)

        def call(self, x, training=False):
            return layer(self, x)

    trainer = twins.make_trainer(
        cls=type("Own", (twins.Twin,), {"shape": (6,)}),
        make=lambda k: k.Sequential([k.Input((6,)), Own(), k.layers.Dense(4)]),
    )
    with pytest.raises(ctl.UsageError, match=match):
        trainer.train(tf.constant(1))


def test_generators_that_no_layer_holds_are_rejected():
    generator = keras.random.SeedGenerator(2)
    rejected(
        lambda self, x: x + keras.random.normal(keras.ops.shape(x), seed=generator, dtype=x.dtype),
        "generator of Keras 3 that no layer of the trainer's models holds",
    )
    rejected(
        lambda self, x: x + keras.random.uniform(keras.ops.shape(x), dtype=x.dtype),
        "generator of Keras 3 that no layer of the trainer's models holds",
    )


def test_draws_that_cannot_be_keyed_are_rejected():
    rejected(
        lambda self, x: (
            x + keras.random.truncated_normal(keras.ops.shape(x), dtype=x.dtype, seed=self.held)
        ),
        "Layer own.* draws random numbers that cannot be keyed by the rows",
    )
    rejected(
        lambda self, x: x * keras.random.uniform((), dtype=x.dtype, seed=self.held),
        "Layer own.* draws a scalar float64, which cannot be keyed",
    )
