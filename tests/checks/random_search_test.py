"""Random numbers that depend on how the batch is split are rejected in one line."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.built.observers import keep_caching_device
from ctl.checks.random_search import RandomOps
from ctl.graphs import ops
import ctl.keras.dropout
from ctl.rows import row_mask
from ctl.rows.trace import Trace
from tests.users_code import running
from tests.users_code.examples import EXAMPLES, Case

layers = tf_keras.layers
ROWS, FEATURES = 4, 8


def trace(function, *, jit=False, **fields):
    """Traces a function of a batch as a step, and searches it."""

    def step(x):
        examples = row_mask.examples(count=ROWS, step=1, trace=Trace(x), **fields)
        with keep_caching_device(), examples as rows:
            result = function(x)
            rows.trace.results = [result]
            RandomOps(None).search(rows.graph.get_operations(), rows)
            return result

    return tf.function(step, jit_compile=jit).get_concrete_function(tf.TensorSpec(SHAPE))


def rejected(function, **arguments):
    with pytest.raises(ctl.UsageError) as caught:
        trace(function, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    "uniform": (lambda x: x + tf.random.uniform(tf.shape(x)), "ctl.random.uniform"),
    "integers": (
        lambda x: tf.gather(x, tf.random.uniform([ROWS], 0, ROWS, tf.int32)), "ctl.random.integers",
    ),
    "scalar": (lambda x: x * tf.random.uniform([]), "ctl.random.uniform"),
    "shuffle": (lambda x: tf.random.shuffle(x), "ctl.random.permutation_of_batch"),
    "stateless shuffle": (
        lambda x: tf.random.experimental.stateless_shuffle(x, [1, 2]), "ctl.random.permutation_of_batch",
    ),
    "categorical": (lambda x: tf.random.categorical(x, 1), "ctl.random.categorical"),
    "gamma": (lambda x: x + tf.random.gamma([FEATURES], 1.0), "the functions of ctl.random"),
    "generator": (lambda x: x + GENERATOR.normal(SHAPE), "instead of tf.random.Generator"),
    "stateless": (
        lambda x: x + tf.random.stateless_uniform(tf.shape(x), [1, 2]), "ctl.random.uniform",
    ),
    "time": (lambda x: x * tf.cast(tf.timestamp() % 2.0, tf.float32), "instead of the time"),
    "in a branch": (nested, "ctl.random.uniform"),
    "in a tf.function": (noisy_function, "ctl.random.normal"),
    "in a loop": (looped, "ctl.random.uniform"),
    "in tf.vectorized_map": (
        lambda x: tf.vectorized_map(lambda r: r + tf.random.uniform([FEATURES]), x), "uniform",
    ),
    "sampled softmax": (
        lambda x: tf.nn.sampled_softmax_loss(
            tf.ones([20, FEATURES]), tf.zeros([20]), tf.ones([ROWS, 1], tf.int64), x, 5, 20
        ),
        "sampled_values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKEYED)
def test_random_op_is_rejected_with_the_line_of_code_and_what_to_write(name):
    function, suggestion = UNKEYED[name]
    message = rejected(function)
    assert re.match(r"tests/checks/random_search_test\.py:\d+ ", message)
    assert suggestion in message and "allow_unkeyed_random=True" in message


def test_random_ops_are_accepted_by_an_option():
    for name in ("uniform", "generator", "in a loop"):
        trace(UNKEYED[name][0], allow_unkeyed=True)


def test_draw_that_nothing_depends_on_is_accepted():
    def sampled(x, use=lambda sample: None):  # as an output that is a distribution
        use(x + tf.random.normal(tf.shape(x)))
        return 2 * x

    trace(sampled)
    variable = tf.Variable(tf.zeros(SHAPE))
    in_python = lambda sample: tf.py_function(abs, [sample], tf.float32)  # noqa: E731
    for use in (variable.assign, tf.print, in_python):
        assert "random" in rejected(functools.partial(sampled, use=use))


def test_draws_of_one_line_or_layer_are_accepted():
    def accepted(x):
        with ctl.random.unkeyed():
            x += tf.map_fn(lambda row: row + tf.random.uniform([]), x)
        return x * tf.random.stateless_uniform([FEATURES], [1, 2])

    layer = layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)))
    trace(accepted)
    layer.call = ctl.random.unkeyed()(layer.call)
    trace(lambda x: layer(accepted(x)))
    assert "RandomUniform" in rejected(lambda x: accepted(x) + tf.random.uniform([]))


def test_rejection_names_the_layer():
    class Noisy(layers.Layer):
        def call(self, inputs):
            return inputs + tf.random.normal(tf.shape(inputs))

    model = tf_keras.Sequential([Noisy(name="my_noise"), layers.Dense(2)])
    message = rejected(model)
    line = Noisy.call.__code__.co_firstlineno + 1
    assert message.startswith(f"tests/checks/random_search_test.py:{line} (in ")
    assert "my_noise" in message


def test_rejection_in_a_compiled_step():
    assert "ctl.random.normal" in rejected(noisy_function, jit=True)


@pytest.mark.parametrize("function", [tf.py_function, tf.numpy_function])
def test_python_code_in_the_step_is_rejected(function):
    call = lambda x: function(lambda y: y, [x], tf.float32)  # noqa: E731
    message = rejected(lambda x: x + tf.reshape(call(x), tf.shape(x)))
    assert "runs Python code in the step" in message and "allow_unkeyed_random=True" in message


def test_weights_that_all_rows_share_are_drawn_shared():
    message = rejected(lambda x: x * tf.random.normal([1, FEATURES]))
    assert f"use ctl.random.normal([1, {FEATURES}], shared=True), `with ctl" in message
    message = rejected(lambda x: tf.matmul(x, tf.random.normal([FEATURES, 2])))
    assert (
        f"use ctl.random.normal([rows, ...]), ctl.random.normal([{FEATURES}, 2], shared=True) for "
        "numbers that all rows share, `with ctl.random.keyed():` around" in message
    )


def test_draw_with_the_rows_on_another_axis_is_not_only_said_to_be_shared():
    def samples_first(x):  # as in libraries of distributions
        return x + tf.reduce_mean(tf.random.normal([2, ROWS, FEATURES]), axis=0)

    assert "use ctl.random.normal([rows, ...]), ctl.random.normal([2, " in rejected(samples_first)


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


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ctl.random.dropout(x, 0.5),
        functools.partial(layers.Dropout(0.5), training=True),
        statistics,
    ],
)
def test_recomputation_that_draws_or_assigns_again_is_rejected(function):
    message = rejected(gradient(function))
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
    names = [op for op in dir(tf.raw_ops) if re.search(pattern, op) and not re.search(other, op)]
    assert [name for name in names if name not in ops.RANDOM] == []
    hidden = {"StochasticCastToInt", "XlaRngBitGenerator"}  # not in tf.raw_ops
    assert {op for op in ops.RANDOM if not hasattr(tf.raw_ops, op)} == hidden


# Draws with a constant seed and a fixed shape are the same on every replica.


def constant(*shape):
    return tf.random.stateless_normal(shape, [1, 2])


TABLE = tf.Variable(tf.ones([16, FEATURES]))
STEP = tf.Variable(3, dtype=tf.int64)
FIXED = {
    "projection": lambda x: x @ constant(FEATURES, ROWS),
    "one vector for all rows": lambda x: x + constant(FEATURES),
    "broadcast row": lambda x: x * constant(1, FEATURES),
    "scalar of the step": lambda x: x * tf.random.stateless_uniform([], tf.stack([0, STEP])),
    "filter": lambda x: tf.nn.conv1d(x[:, :, None], constant(3, 1, 4), 1, "SAME"),
    "table": lambda x: tf.gather(constant(16, 3), tf.cast(x[:, 0] > 0, tf.int32)),
    "other size": lambda x: tf.reduce_sum(x) + tf.reduce_sum(constant(3, 5)),
    "distances to anchors": lambda x: x @ tf.transpose(constant(16, FEATURES)),
    "seed of ctl": lambda x: (
        x * tf.random.stateless_gamma([], ctl.random.integers([2], 0, 2**31 - 1, shared=True), 0.3)
    ),
}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_draw_is_not_rejected(name):
    trace(FIXED[name])


PER_ROW = {
    "added": lambda x: x + constant(*SHAPE),
    "concatenated": lambda x: tf.concat([x, constant(ROWS, 3)], axis=1),
    "one per row": lambda x: tf.reduce_sum(x, 1) * constant(ROWS),
    "mix of rows": lambda x: constant(ROWS, ROWS) @ x,
    "time first": lambda x: (
        tf.transpose(tf.reshape(x, [ROWS, 2, 4]), [1, 0, 2]) + constant(2, ROWS, 1)
    ),
    "folded": lambda x: tf.reshape(x, [ROWS * 2, 4]) + constant(ROWS * 2, 4),
    "chosen by rows": lambda x: tf.where(constant(*SHAPE) > 0, x, tf.zeros_like(x)),
    "in a loop": lambda x: tf.map_fn(lambda row: row + constant(FEATURES), x),
}


@pytest.mark.parametrize("name", PER_ROW)
def test_fixed_draw_with_one_entry_per_row_is_rejected(name):
    assert "depend on how the batch is split" in rejected(PER_ROW[name])


def test_one_entry_per_row_of_a_micro_batch_is_rejected_and_a_projection_is_not():
    def step(x, columns):
        half = x[: ROWS // 2]
        return half @ constant(FEATURES, columns) + half[:, :1] * constant(columns)

    for columns in (1, ROWS // 2, ROWS):
        trace(functools.partial(step, columns=columns), micro_batches=2)
    message = rejected(lambda x: x[: ROWS // 2] * constant(ROWS // 2, 1), micro_batches=2)
    assert "depend on how the batch is split" in message


# In the update, all values are those of the global batch: sizes are numbers of rows by coincidence.


def noisy(gradient):
    """Adds a fixed draw, whose shape is [6, 3] for a kernel: 7 rows on 4 replicas are 2 on each."""
    return gradient + 0.1 * tf.random.stateless_normal(gradient.shape, [5, 6], dtype=gradient.dtype)


class Transformed(Case):
    def transform_gradients(self, gradients, variables):
        return [noisy(each) for each in gradients]


class NoisySGD(tf_keras.optimizers.SGD):
    def update_step(self, gradient, variable):
        super().update_step(noisy(gradient), variable)


class Optimized(Case):
    def __init__(self, **arguments):
        super().__init__(**arguments | {"optimizer": lambda: NoisySGD(0.1)})


class Backward(Case):
    def per_example_loss(self, batch, outputs):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), noisy

        return super().per_example_loss(batch, identity(outputs))


@pytest.mark.parametrize("split", [running.Split(4, 7), running.Split(2, 8, 2)])
@pytest.mark.parametrize("case", [Transformed, Optimized])
def test_fixed_draw_in_the_update_is_not_rejected(case, split):
    reference = running.train(case, split.reference)
    assert running.difference(reference, running.train(case, split)) < 1e-12


def test_fixed_draw_in_the_backward_pass_is_rejected():
    with pytest.raises(ctl.UsageError, match="depend on how the batch is split"):
        running.train(Backward, running.Split(4, 7))


def draw(x, number, rows=()):
    return tf.random.stateless_normal([*rows, 6], tf.stack([number, 7]), dtype=x.dtype)


class BySeed(Case):
    """Noise by the ids of the examples."""

    features = ("x", "id")

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": EXAMPLES["x"], "id": np.arange(len(EXAMPLES["x"]))})

    def noise(self, x, ids):
        return tf.map_fn(lambda i: draw(x, i), ids, fn_output_signature=x.dtype)

    def forward(self, batch, training):
        return self.model(batch["x"] + self.noise(batch["x"], batch["id"]), training=training)

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(outputs**2, axis=1)


class OfFirstRow(BySeed):
    def noise(self, x, ids):
        return draw(x, ids[0])


class OfFunction(BySeed):
    """The function gets its seed as an argument, and draws for each row of a replica."""

    def noise(self, x, ids):
        function = tf.function(lambda x, seed: draw(x, seed, x.shape[:1]))
        return function(x, tf.constant(7))


def test_draw_with_the_seed_of_each_row_is_a_function_of_the_rows():
    split = running.Split(2, 7)
    reference = running.train(BySeed, split.reference)
    assert running.difference(reference, running.train(BySeed, split)) < 1e-12


@pytest.mark.parametrize(
    ("case", "message"),
    [(OfFirstRow, r"_test\.py:\d+ combines rows"), (OfFunction, "uses the place of a row")],
)
def test_seed_of_another_row_or_of_none_is_rejected(case, message):
    with pytest.raises(ctl.UsageError, match=message):
        running.train(case, running.Split(2, 8))
