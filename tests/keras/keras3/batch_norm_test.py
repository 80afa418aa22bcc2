"""Batch normalization of Keras 3 computes like that of ctl in tf_keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.keras import models


def test_one_replica_without_synchronization_computes_as_keras():
    x = tf.constant(np.random.default_rng(0).normal(3, 2, (7, 5, 3)))
    layer, original = (keras.layers.BatchNormalization(dtype="float64") for _ in range(2))
    layer.build(x.shape)
    assert np.array_equal(models.adapt(layer)(x, training=True), original(x, training=True))
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
    with pytest.raises(ctl.UsageError, match=r"Own .*synchronized=True"):
        models.adapt(keras.Sequential([Own(synchronized=True)]))
