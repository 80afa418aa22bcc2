"""LAMB and LARS compute the numbers of Model Garden's legacy optimizers."""

import importlib.util
import pathlib

import numpy as np
import official
import pytest
import tensorflow as tf

from ctl.optimizers.layerwise import LAMB, LARS
from ctl.optimizers.warm_up import InverseSqrt, WarmUp


def model_garden(module, name):
    """Loads a class from its file, because its package imports packages that are not installed."""
    folder = pathlib.Path(official.__path__[0], "modeling/optimization")
    spec = importlib.util.spec_from_file_location(f"model_garden_{module}", folder / f"{module}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def train(optimizer, steps=12):
    """Returns a matrix and a vector that start alike, after updates with the same gradients."""
    draw = np.random.default_rng(0)
    variables = [
        tf.Variable(draw.normal(size=(4, 3)), name="dense/kernel"),
        tf.Variable(draw.normal(size=3), name="dense/bias"),
        tf.Variable(np.zeros(2), name="zeros"),
    ]
    for step in range(steps):
        gradients = [tf.constant(draw.normal(size=v.shape)) for v in variables]
        if step == 5:
            gradients = [tf.zeros_like(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return [v.numpy() for v in variables]


def exclude_bias(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


# The hyperparameters of Model Garden's optimizers are float32.
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_lamb_computes_what_model_garden_computes(decay):
    options = dict(weight_decay_rate=decay, exclude_from_weight_decay=["bias"])
    expected = train(model_garden("lamb", "LAMB")(0.0625, **options))
    actual = train(exclude_bias(LAMB(0.0625, weight_decay=decay)))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_lars_computes_what_model_garden_computes(decay, nesterov):
    same = dict(momentum=0.75, nesterov=nesterov)
    options = dict(eeta=0.125, weight_decay_rate=decay, exclude_from_weight_decay=["bias"])
    expected = train(model_garden("lars", "LARS")(0.5, **same, **options))
    optimizer = LARS(0.5, **same, trust_coefficient=0.125, weight_decay=decay)
    for a, b in zip(train(exclude_bias(optimizer)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [LAMB, LARS])
def test_sparse_gradient_counts_as_the_dense_one(cls):
    sparse = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 5.0]]), tf.constant([2, 0]), [3, 2])
    results = []
    for gradient in (sparse, tf.convert_to_tensor(sparse)):
        variable = tf.Variable(np.arange(6, dtype=np.float32).reshape(3, 2))
        optimizer = cls(0.25)
        for _ in range(3):
            optimizer.apply_gradients([(gradient, variable)])
        results.append(variable.numpy())
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("cls", [LAMB, LARS])
def test_config_makes_an_equal_optimizer(cls):
    for rate in (0.25, WarmUp(0.25, 3, 0.25), WarmUp(0.25, 3, InverseSqrt(0.25, 3))):
        config = cls(rate, weight_decay=0.5).get_config()
        assert cls.from_config(config.copy()).get_config() == config
