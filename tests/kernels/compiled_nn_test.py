"""GELU and max pooling in compiled steps: their values, their gradients, and what XLA computes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from ctl.graphs import ops
from ctl.kernels import compiled_nn
from ctl.rows import row_mask


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Pretends that XLA compiles for a GPU."""
    monkeypatch.setattr(compiled_nn, "is_compiled_for_gpu", lambda tensor: ops.is_compiled())


def compute(function, x, weights=None, *, step=True, kernels=True):
    """Returns the values and the gradient of a function in a compiled step, and the program."""

    @tf.function(jit_compile=True)
    def run(x):
        with row_mask.examples(count=8, kernels=kernels) if step else tf.name_scope("outside"):
            return differentiate(function, x, weights)

    return *run(x), run.experimental_get_compiler_ir(x)(stage="hlo")


def differentiate(function, x, weights=None):
    """Returns the values, and the gradient of their sum with weights."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y, tape.gradient(y, x, weights)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_gelu_has_the_values_and_the_gradient_of_float64_rounded_once(dtype):
    x = tf.cast(tf.linspace(-9.0, 9.0, 2000), dtype)
    y, gradient, _ = compute(tf.nn.gelu, x)
    expected = differentiate(tf.nn.gelu, tf.cast(x, tf.float64))
    # Half a unit in the last place, and the error of 1 + erf in float32 for x < -4.
    for value, exact in zip((y, gradient), expected, strict=True):
        rounded = np.abs(exact) * np.finfo(dtype.as_numpy_dtype).eps / 2 if dtype == tf.float16 else (
            np.abs(exact) * 2.0**-8
        )  # fmt: skip
        assert np.all(np.abs(tf.cast(value, tf.float64) - exact) <= 1.01 * rounded + 1e-6)


def test_the_gradient_of_gelu_needs_the_input_alone():
    x = tf.zeros([8, 16], tf.bfloat16)
    program = compute(tf.nn.gelu, x)[2]
    # XLA would store erfc, and the gradient in float32 for the gradient of a bias.
    assert 'op_type="Erf"' in program and 'op_type="Erfc"' not in program
    assert "opt-barrier" in program
    # A penalty on the gradient differentiates twice.
    compute(lambda x: differentiate(tf.nn.gelu, x)[1], x)
    for other in (
        compute(lambda x: tf.nn.gelu(x, approximate=True), x),
        compute(tf.nn.gelu, x, step=False),
        compute(tf.nn.gelu, x, kernels=False),
        compute(tf.nn.gelu, tf.cast(x, tf.float32)),
    ):
        assert 'op_type="Erf"' not in other[2]


@pytest.mark.parametrize(
    ("height", "width", "arguments"),
    [
        (6, 6, (2, 2, "VALID")),
        (7, 5, (2, 2, "SAME")),
        (9, 11, (3, 2, "SAME")),  # windows overlap
        (9, 8, ([1, 3, 2, 1], [1, 1, 2, 1], "VALID")),
        (8, 9, (2, 2, "VALID")),  # elements without a window
    ],
)
@pytest.mark.parametrize("dtype", [tf.float64, tf.float16])
def test_max_pooling_has_the_values_and_the_gradient_of_tensorflow(height, width, arguments, dtype):
    # Small integers: a window has equal elements, of which the first one gets the gradient.
    numbers = np.random.default_rng(0).integers(-5, 1, [2, height, width, 2])
    x = tf.constant(numbers, dtype)

    def pool(x):
        return tf.nn.max_pool(x, *arguments)

    shape = pool(x).shape
    weights = tf.reshape(tf.cast(tf.range(1, 1 + shape.num_elements()), dtype), shape)
    y, gradient, program = compute(pool, x, weights)
    expected = differentiate(pool, x, weights)
    np.testing.assert_array_equal(y, expected[0])
    np.testing.assert_array_equal(gradient, expected[1])
    assert "select-and-scatter" not in program


@pytest.mark.parametrize("layers", [tf_keras.layers, keras.layers])
def test_the_layers_of_keras_have_the_same_max_pooling(layers):
    program = compute(layers.MaxPooling2D(3, 2, "same"), tf.ones([2, 8, 8, 2]))[2]
    assert "reduce-window" not in program and "select-and-scatter" not in program


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        ({"ksize": 4, "strides": 2}, True),
        ({"ksize": 2, "strides": 3}, True),  # gaps between the windows
        ({"ksize": 2, "strides": 2, "data_format": "NCHW"}, True),
        ({"ksize": np.array([4, 4]), "strides": None}, True),
        ({"ksize": 2, "strides": 2}, False),
    ],
)
def test_other_max_pooling_is_that_of_tensorflow(arguments, step):
    def pool(x):
        return tf.nn.max_pool(x, padding="SAME", **arguments)

    assert "select-and-scatter" in compute(pool, tf.ones([2, 8, 8, 2]), step=step)[2]


def test_max_pooling_is_that_of_tensorflow_if_kernels_are_off():
    layer, x = tf_keras.layers.MaxPooling2D(2), tf.ones([2, 8, 8, 2])
    assert "select-and-scatter" in compute(layer, x, kernels=False)[2]
