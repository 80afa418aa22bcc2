"""The private names of Keras 3 mean what ctl takes them for, in the installed version."""

import keras
import numpy as np
import tensorflow as tf

from ctl.keras import models
from ctl.keras.keras3 import private


def test_variables_layers_and_generators_are_those_of_the_layer():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.BatchNormalization()])
    dense, drop = inner.layers
    assert private.layers_of(dense, recursive=True) == []
    assert {dense, drop, inner} < {*private.layers_of(model, recursive=True)}
    assert dense not in private.layers_of(model, recursive=False)
    assert private.variables_of(dense, trainable=True) == [dense.kernel, dense.bias]
    norm = model.layers[1]
    assert private.variables_of(norm, trainable=False) == [norm.moving_mean, norm.moving_variance]
    assert isinstance(private.value_of(dense.kernel), tf.Variable)
    assert private.seed_generators(drop) == [drop.seed_generator]
    private.set_trainable(dense, False)
    assert not dense.trainable and not dense.kernel.trainable and model.trainable


def test_names_start_again():
    models.reset_names()
    assert keras.layers.Dense(1).name == "dense"
    models.reset_names()
    assert [keras.layers.Dense(1).name for _ in range(2)] == ["dense", "dense_1"]


def test_inherited_state_of_a_call_is_restored():
    states = []

    class Inner(keras.layers.Layer):
        def call(self, inputs, training=None):
            self.seen = training
            return inputs

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def call(self, inputs, training=None):
            states.append(private.CallState())
            return self.inner(inputs)

    outer = Outer()
    outer(np.ones([1, 1]), training=True)
    outer.inner(np.ones([1, 1]))
    assert not outer.inner.seen
    with states[-1].restored():
        outer.inner(np.ones([1, 1]))
    assert outer.inner.seen is True
