"""Random numbers that depend on how the batch is split are rejected in one line."""

import functools
import re

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.replica.graphs import random_ops
import ctl.replica.random.dropout
from tests.replica.step.traced_step import FEATURES, ROWS, rejected, trace

layers = tf_keras.layers


GENERATOR = tf.random.Generator.from_seed(1)
SHAPE = (ROWS, FEATURES)


def nested(x):
    return tf.cond(x[0, 0] > 0, lambda: x + tf.random.uniform(tf.shape(x)), lambda: x)


@tf.function
def noisy_function(x):
    return x + tf.random.normal(tf.shape(x))


def looped(x):
    for _ in tf.range(3):
        x += tf.random.uniform(tf.shape(x))
    return x


UNKEYED = {
    "tf.nn.dropout": (lambda x: tf.nn.dropout(x, 0.5), "ctl.random.dropout"),
    "backend.dropout": (lambda x: tf_keras.backend.dropout(x, 0.5), "ctl.random.dropout"),
    "uniform": (lambda x: x + tf.random.uniform(tf.shape(x)), "ctl.random.uniform"),
    "normal": (lambda x: x + tf.random.normal(tf.shape(x)), "ctl.random.normal"),
    "truncated": (lambda x: x + tf.random.truncated_normal(SHAPE), "ctl.random.truncated_normal"),
    "integers": (
        lambda x: tf.gather(x, tf.random.uniform([ROWS], 0, ROWS, tf.int32)),
        "ctl.random.integers",
    ),
    "scalar": (lambda x: x * tf.random.uniform([]), "ctl.random.uniform"),
    "shuffle": (lambda x: tf.random.shuffle(x), "ctl.random.permutation_of_batch"),
    "stateless shuffle": (
        lambda x: tf.random.experimental.stateless_shuffle(x, [1, 2]),
        "ctl.random.permutation_of_batch",
    ),
    "categorical": (lambda x: tf.random.categorical(x, 1), "ctl.random.categorical"),
    "gamma": (lambda x: x + tf.random.gamma([FEATURES], 1.0), "the functions of ctl.random"),
    "poisson": (lambda x: tf.random.poisson([2], x), "the functions of ctl.random"),
    "generator": (lambda x: x + GENERATOR.normal(SHAPE), "instead of tf.random.Generator"),
    "stateless": (
        lambda x: x + tf.random.stateless_uniform(tf.shape(x), [1, 2]),
        "ctl.random.uniform",
    ),
    "stateless dropout": (
        lambda x: tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2]),
        "ctl.random.dropout",
    ),
    "seed of the batch": (
        lambda x: x + tf.random.stateless_normal([FEATURES], tf.cast(x[0, :2], tf.int32)),
        "ctl.random.normal",
    ),
    "in a branch": (nested, "ctl.random.uniform"),
    "in a tf.function": (noisy_function, "ctl.random.normal"),
    "in a loop": (looped, "ctl.random.uniform"),
    "in tf.map_fn": (
        lambda x: tf.map_fn(lambda r: r + tf.random.uniform([FEATURES]), x),
        "uniform",
    ),
    "in tf.vectorized_map": (
        lambda x: tf.vectorized_map(lambda r: r + tf.random.uniform([FEATURES]), x),
        "uniform",
    ),
    "sampled softmax": (
        lambda x: tf.nn.sampled_softmax_loss(
            tf.ones([20, FEATURES]), tf.zeros([20]), tf.ones([ROWS, 1], tf.int64), x, 5, 20
        ),
        "sampled_values",
    ),
    "fractional pooling": (
        lambda x: tf.nn.fractional_max_pool(x[:, :, None, None], [1, 1.5, 1, 1])[0],
        "the functions of ctl.random",
    ),
}


@pytest.mark.parametrize("name", UNKEYED)
def test_random_op_is_rejected_with_the_line_of_code_and_what_to_write(name):
    function, suggestion = UNKEYED[name]
    message = rejected(function)
    assert re.match(r"tests/replica/checks/random_search_test\.py:\d+ ", message)
    assert suggestion in message and "allow_unkeyed_random=True" in message
    trace(function, allow=True)


def test_rejection_names_the_layer():
    class Noisy(layers.Layer):
        def call(self, inputs):
            return inputs + tf.random.normal(tf.shape(inputs))

    model = tf_keras.Sequential([Noisy(name="my_noise"), layers.Dense(2)])
    message = rejected(model)
    line = Noisy.call.__code__.co_firstlineno + 1
    assert message.startswith(f"tests/replica/checks/random_search_test.py:{line} (in ")
    assert "my_noise" in message


def test_rejection_in_a_compiled_step():
    assert "ctl.random.normal" in rejected(noisy_function, jit=True)


@pytest.mark.parametrize("function", [tf.py_function, tf.numpy_function])
def test_python_code_in_the_step_is_rejected(function):
    message = rejected(
        lambda x: x + tf.reshape(function(lambda y: y, [x], tf.float32), tf.shape(x))
    )
    assert "runs Python code in the step" in message and "allow_unkeyed_random=True" in message


def test_weights_that_all_rows_share_are_drawn_shared():
    message = rejected(lambda x: x * tf.random.normal([1, FEATURES]))
    assert f"use ctl.random.normal([1, {FEATURES}], shared=True), or accept" in message
    message = rejected(lambda x: tf.matmul(x, tf.random.normal([FEATURES, 2])))
    assert (
        f"use ctl.random.normal([rows, ...]), ctl.random.normal([{FEATURES}, 2], shared=True) for "
        "numbers that all rows share, or accept" in message
    )


KERNEL = tf.Variable(tf.ones([FEATURES, FEATURES]))
COUNT = tf.Variable(3, dtype=tf.int64)


# The backward pass.


def gradient(function):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.recompute_grad(function)(x @ KERNEL) ** 2)
        return tape.gradient(loss, KERNEL)

    return step


def statistics(x):
    COUNT.assign_add(1)
    return tf.nn.tanh(x)


RECOMPUTED = {
    "ctl": lambda x: ctl.random.dropout(x, 0.5),
    "keras": layers.Dropout(0.5),
    "tf": lambda x: tf.nn.dropout(x, 0.5),
    "assignment": statistics,
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_that_draws_or_assigns_again_is_rejected(name):
    call = (
        functools.partial(RECOMPUTED[name], training=True) if name == "keras" else RECOMPUTED[name]
    )
    message = rejected(gradient(call))
    if name != "tf":  # rejected for its forward pass
        assert "in the backward pass" in message and "use ctl.recompute instead" in message


def test_other_recomputation_is_not_rejected():
    trace(gradient(lambda x: tf.nn.tanh(x @ KERNEL)))


def test_gradient_of_a_loop_that_draws_is_not_rejected():
    def step(x):
        with tf.GradientTape() as tape:
            y = x @ KERNEL
            for _ in tf.range(3):
                y = ctl.random.dropout(y, 0.5) + tf.cond(y[0, 0] > 0, lambda y=y: y, lambda y=y: -y)
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, KERNEL)

    trace(tf.autograph.experimental.do_not_convert(lambda x: tf.function(step)(x)))
    trace(step)


def test_function_that_draws_and_is_called_twice_is_rejected():
    dropped = tf.function(lambda x: ctl.random.dropout(x, 0.5))
    trace(lambda x: dropped(x))
    assert "remove your own @tf.function" in rejected(lambda x: dropped(x) + dropped(2 * x))


# The search itself.


def test_every_random_op_of_tensorflow_is_known():
    pattern = "Random|Sampler|Multinomial|State(ful|less)[A-Z]|Rng|Shuffle|NonDet|Fractional"
    other = (
        "Dataset|SeedGenerator|Queue|TPUEmbedding|Grad$|If$|While$|Case$|GetAlg|GetKey|PartitionedCall"
        "|PyFunc|^AllCandidateSampler$|^RandomIndexShuffle$"
    )
    ops = [op for op in dir(tf.raw_ops) if re.search(pattern, op) and not re.search(other, op)]
    assert [op for op in ops if op not in random_ops.RANDOM] == []
    hidden = {
        "StochasticCastToInt",
        "XlaRngBitGenerator",
    }  # without a Python function in tf.raw_ops
    assert {op for op in random_ops.RANDOM if not hasattr(tf.raw_ops, op)} == hidden
