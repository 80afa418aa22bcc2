"""Batch normalization of Keras 3 computes like that of ctl in tf_keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.replica import examples
from ctl.replica.arithmetic import models

X = np.random.default_rng(0).normal(3, 2, (7, 5, 3))


def make(**arguments):
    model = keras.Sequential(
        [keras.Input(X.shape[1:], dtype=arguments.get("dtype", "float64")),
         keras.layers.BatchNormalization(**{"dtype": "float64", **arguments})]
    )  # fmt: skip
    return models.adapt(model), model.layers[0]


def outputs_and_gradient(model, x, mask=None, weight=None):
    x = tf.constant(x)
    with examples(mask), tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
        loss = tf.reduce_sum(y**3 if weight is None else weight * y**3)
    return y.numpy(), tape.gradient(loss, x).numpy()


def test_padding_is_in_no_statistic_and_has_no_gradient():
    plain, padded = make(synchronized=True), make(synchronized=True)
    y, dx = outputs_and_gradient(plain[0], X)
    filled = np.concatenate([X, np.full([2, *X.shape[1:]], np.nan)])
    mask = np.array([1.0] * 7 + [0.0] * 2)
    y2, dx2 = outputs_and_gradient(padded[0], filled, mask, mask.reshape(-1, 1, 1))
    assert np.allclose(y2[:7], y, atol=1e-14)
    assert np.allclose(dx2[:7], dx, atol=1e-13)
    for one, two in zip(plain[1].weights, padded[1].weights, strict=True):
        assert np.allclose(one, two, atol=1e-14)


def test_variance_is_right_far_from_zero():
    model, layer = make(synchronized=True, dtype="float32", momentum=0.0)
    x = 1000 + X.astype("float32") * 0.05
    model(tf.constant(x), training=True)
    assert np.allclose(layer.moving_variance, x.astype("float64").var((0, 1)), rtol=1e-4)


def test_one_replica_without_synchronization_computes_as_keras():
    model, layer = make()
    original = keras.layers.BatchNormalization(dtype="float64")
    assert np.array_equal(
        model(tf.constant(X), training=True), original(tf.constant(X), training=True)
    )
    for one, two in zip(layer.weights, original.weights, strict=True):
        assert np.array_equal(one, two)


def test_layers_are_converted_and_keep_their_values():
    strategy = testing.make_strategy(2)
    with strategy.scope():
        inner = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(name="a")])
        model = keras.Sequential(
            [keras.Input((4,)), inner, keras.layers.BatchNormalization(name="b")]
        )
        inner.layers[0].moving_mean.assign([1.0, 2, 3, 4])
        assert ctl.convert_sync_batch_norm(model) == ["a", "b"]
        assert ctl.convert_sync_batch_norm(model) == []
    layer = inner.layers[0]
    assert layer.synchronized and np.array_equal(layer.moving_mean, [1, 2, 3, 4])
    mean = models.raw([layer.moving_mean])[0]
    assert mean.name == "a/moving_mean:0"
    assert mean.synchronization == tf.VariableSynchronization.ON_READ


def test_axis_of_the_rows_is_rejected():
    layer = models.adapt(keras.layers.BatchNormalization(axis=0, synchronized=True))
    with pytest.raises(ctl.UsageError, match="normalizes axis 0, the rows"):
        layer(tf.ones([3, 4]), training=True)


def test_derived_classes_are_plain_or_rejected():
    class Own(keras.layers.BatchNormalization):
        pass

    with testing.make_strategy(2).scope():
        layer = Own()
        layer.build((None, 3))
        models.adapt(layer)
    mean = models.raw([layer.moving_mean])[0]
    assert mean.aggregation == tf.VariableAggregation.MEAN
    with pytest.raises(ctl.UsageError, match="is an Own with synchronized=True, which counts"):
        models.adapt(keras.Sequential([Own(synchronized=True)]))
