"""GELU and max pooling in compiled steps: their values, their gradients, and what XLA computes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.replica.arithmetic import row_mask
from ctl.replica.graphs import ops
from ctl.replica.layers import compiled_nn
from ctl.replica.step.inner_loop import loop_of


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Pretends that XLA compiles for a GPU."""
    monkeypatch.setattr(compiled_nn, "is_compiled_for_gpu", lambda tensor: ops.is_compiled())


def compute(function, x, *, step=True):
    """Returns the values and the gradient of a function in a compiled step, and the program."""

    @tf.function(jit_compile=True)
    def run(x):
        with row_mask.examples(count=8) if step else tf.name_scope("outside"):
            return differentiate(function, x)

    return *run(x), run.experimental_get_compiler_ir(x)(stage="hlo")


def differentiate(function, x, weights=None):
    """Returns the values, and the gradient of their sum with `weights(values)`."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y, tape.gradient(y, x, weights and weights(y))


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
    for other in (
        compute(lambda x: tf.nn.gelu(x, approximate=True), x),
        compute(tf.nn.gelu, x, step=False),
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
        (9, 9, (2, 3, "VALID")),  # elements without a window
    ],
)
@pytest.mark.parametrize("dtype", [tf.float64, tf.float16])
def test_max_pooling_has_the_values_and_the_gradient_of_tensorflow(height, width, arguments, dtype):
    # Small integers: a window has equal elements, of which the first one gets the gradient.
    numbers = np.random.default_rng(0).integers(-5, 1, [2, height, width, 2])
    x = tf.constant(numbers, dtype)

    def weigh(y):
        return tf.reshape(tf.range(1, tf.size(y, tf.int64) + 1), y.shape)

    def pool(x):
        y, gradient = differentiate(
            lambda x: tf.nn.max_pool(x, *arguments), x, lambda y: tf.cast(weigh(y), y.dtype)
        )
        return tf.concat([tf.reshape(y, [-1]), tf.reshape(gradient, [-1])], 0)

    compiled, _, program = compute(pool, x)
    np.testing.assert_array_equal(compiled, pool(x))
    assert "select-and-scatter" not in program


def test_other_max_pooling_is_that_of_tensorflow():
    images = tf.random.stateless_normal([2, 8, 8, 2], [0, 0])
    for pool in (
        lambda x: tf.nn.max_pool(x, 4, 4, "VALID"),
        lambda x: tf.nn.max_pool(x, 2, 2, "VALID", data_format="NCHW"),
    ):
        assert "select-and-scatter" in compute(pool, images)[2]
    assert (
        "select-and-scatter"
        in compute(lambda x: tf.nn.max_pool(x, 2, 2, "SAME"), images, step=False)[2]
    )


class Images(ctl.StandardTrainer):
    """Convolutions and max pooling by one of the two versions of Keras."""

    layers = tf_keras.layers

    def build_model(self):
        sequential = tf_keras.Sequential if self.layers is tf_keras.layers else keras.Sequential
        return sequential([
            self.layers.Input([9, 9, 1]), self.layers.Conv2D(2, 2, activation="relu"),
            self.layers.MaxPooling2D(3, 2, "same"), self.layers.MaxPooling2D(),
            self.layers.Flatten(), self.layers.Dense(3),
        ])  # fmt: skip

    def build_dataset(self, split, input_context):
        rng = np.random.default_rng(1)
        examples = {"x": rng.normal(size=[23, 9, 9, 1]), "label": rng.integers(0, 3, 23)}
        return ctl.data.arrays(examples)

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )


@pytest.mark.parametrize(
    "layers", [tf_keras.layers, pytest.param(keras.layers, marks=pytest.mark.slow)]
)
def test_a_step_with_max_pooling_is_that_without_xla(layers):
    compiled, expected = (
        type("T", (Images,), {"layers": layers})(
            strategy=testing.make_strategy(1),
            global_batch_size=8,
            optimizer=lambda: tf_keras.optimizers.SGD(0.1),
            options=ctl.TrainerOptions(precision="float64", xla=xla),
        )
        for xla in ("loop", "off")
    )
    compiled.model.set_weights(expected.model.get_weights())
    for trainer in (compiled, expected):
        trainer.train(tf.constant(4))
    (program,) = loop_of(compiled).compiled_loop.traces()
    assert 'op: "MaxPool' not in str(program.graph.as_graph_def())
    for one, other in zip(compiled.model.weights, expected.model.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-12)
