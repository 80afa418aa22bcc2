"""Draws in loops, in folded axes and in layers that no model holds are keyed by the row."""

import functools
import itertools
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.built.explanations import explained
from ctl.built.observers import keep_caching_device
from ctl.checks import random_search
from ctl.keras import dropout
from ctl.rows import row_mask
from ctl.rows.trace import Trace
from tests.support.checks import one_line

layers = tf_keras.layers
ROWS, TIME, FEATURES = 6, 3, 4


class Dropping(layers.Layer):
    """A user's own cell that drops a part of its state in each time step."""

    def __init__(self):
        super().__init__()
        self.state_size = self.output_size = FEATURES
        self.drop = layers.Dropout(0.5)

    def call(self, inputs, states):
        output = self.drop(inputs + states[0], training=True)
        return output, [output]


def keyed(layer):
    """A function that calls a layer of a keyed model."""
    model = tf_keras.Sequential([layer])
    model.build([None, TIME, FEATURES])
    dropout.key_random_layers(model, 0)
    return lambda x: model(x, training=True)


def by_scan(x):
    steps = tf.transpose(x, [1, 0, 2])
    outputs = tf.scan(
        lambda a, b: a + ctl.random.normal(tf.shape(b)), steps, tf.zeros_like(x[:, 0])
    )
    return tf.transpose(outputs, [1, 0, 2])


def by_loops(x):
    """A loop in a loop, each of which draws."""
    for _ in tf.range(2):
        x += ctl.random.normal(tf.shape(x))
        for _ in tf.range(2):
            x = ctl.random.dropout(x, 0.3)
    return x


def by_fold(x):
    folded = tf.reshape(x, [-1, FEATURES])
    folded = ctl.random.dropout(tf.nn.relu(folded + 1.0), 0.5)
    folded += ctl.random.normal(tf.shape(folded))
    return tf.reshape(folded, [-1, TIME, FEATURES])


def by_repeat(x):
    repeated = tf.repeat(x, 2, axis=0)
    return tf.reshape(repeated + ctl.random.normal(tf.shape(repeated)), [-1, 2, TIME, FEATURES])


def by_number(x):
    latent = ctl.random.normal([None, 2], per_row=5)
    return tf.reshape(latent, [-1, 5, 2]) + x[:, :1, :2]


def by_views(x):
    dropped = ctl.random.dropout(tf.concat([x, x], axis=0), 0.5)
    return tf.stack(tf.split(dropped, 2), axis=1)


def made_in_the_step(x):
    return layers.GaussianNoise(1.0)(layers.Dropout(0.5)(x, training=True), training=True)


CASES = {
    "RNN cell": keyed(layers.RNN(Dropping(), return_sequences=True)),
    "LSTM": keyed(layers.LSTM(3, dropout=0.4, recurrent_dropout=0.3, return_sequences=True)),
    "TimeDistributed": keyed(layers.TimeDistributed(layers.Dropout(0.5))),
    "scan": by_scan,
    "loops": by_loops,
    "fold": by_fold,
    "repeat": by_repeat,
    "per_row": by_number,
    "views": by_views,
    "made in the step": made_in_the_step,
}


@functools.cache
def trace(function, rows, jit):
    """Traces `function` as a step on so many rows, None for a number that is not static."""

    def traced(x, first_row):
        count = x.shape[0] if x.shape[0] is not None else tf.shape(x)[0]
        trace = Trace(x)
        fields = dict(first_row=first_row, step=0, count=count, trace=trace)
        with keep_caching_device(), row_mask.examples(**fields) as selected:
            result = function(x)
            random_search.search(selected.graph.get_operations(), selected)
            return result

    spec = tf.TensorSpec([rows, TIME, FEATURES])
    signature = [spec, tf.TensorSpec([], tf.int64)]
    return tf.function(traced, jit_compile=jit, input_signature=signature)


def run(function, start, end, *, jit=False, static=True):
    """The result for the rows start..end of a global batch of ones."""
    traced = trace(function, end - start if static else None, jit)
    return traced(tf.ones([end - start, TIME, FEATURES]), tf.constant(start, tf.int64)).numpy()


# Other cases of cells and of loops run by default.
SLOW = ("LSTM", "RNN cell", "scan")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES]
)
def test_numbers_of_a_replica_are_its_slice_of_those_of_the_global_batch(name):
    expected = run(CASES[name], 0, ROWS, static=False)
    assert len({row.tobytes() for row in expected}) == ROWS
    for cuts, static in (([0, 5, 6], True), ([0, 1, 4, 4, 6], False)):
        parts = [run(CASES[name], a, b, static=static) for a, b in itertools.pairwise(cuts)]
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [pytest.param("RNN cell", marks=pytest.mark.slow), "fold"])
def test_xla_draws_the_same_numbers(name):
    expected = run(CASES[name], 1, ROWS)
    np.testing.assert_allclose(run(CASES[name], 1, ROWS, jit=True), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["RNN cell", "TimeDistributed", "scan", "fold"])
def test_each_time_step_draws_other_numbers(name):
    outputs = run(CASES[name], 0, ROWS, static=False)
    differences = np.diff(outputs, axis=1, prepend=0) if name == "scan" else outputs
    assert len({differences[:, t].tobytes() for t in range(TIME)}) == TIME


def test_iterations_of_nested_loops_draw_other_numbers():
    def draw(x):
        numbers = tf.TensorArray(tf.float32, 6)
        for i in tf.range(2):
            for j in tf.range(3):
                numbers = numbers.write(3 * i + j, ctl.random.uniform([None]))
        return numbers.stack()

    drawn = run(draw, 0, ROWS)
    assert len(np.unique(drawn)) == drawn.size == 6 * ROWS


def test_gradient_of_a_loop_uses_the_masks_of_its_forward_pass():
    def masked(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = ctl.random.dropout(y, 0.3)
        return tf.stack([y, tape.gradient(y, x)])  # y = mask x, so the gradient is y for ones

    y, gradient = run(masked, 0, ROWS)
    np.testing.assert_allclose(gradient, y, rtol=1e-6)
    assert 0 < np.mean(y == 0) < 1


def time_major(x):
    return ctl.random.dropout(tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, FEATURES]), 0.5)


KERNEL = tf.Variable(tf.ones([2 * ROWS, 3]))
REJECTED = {
    "time first": time_major,
    "tiled": lambda x: tf.tile(x, [2, 1, 1]) + ctl.random.normal([2 * ROWS, TIME, FEATURES]),
    "weights": lambda x: x[:, :1, :3] + layers.Dropout(0.5)(KERNEL, training=True)[:1],
    "nothing to compare with": lambda x: ctl.random.normal([2 * ROWS, 4]),
    "no multiple": lambda x: ctl.random.normal([ROWS + 1, 4]),
    "wrong per_row": lambda x: ctl.random.normal([2 * ROWS, 4], per_row=3),
    "rows of tf.map_fn": lambda x: tf.map_fn(lambda row: ctl.random.dropout(row, 0.5), x),
    "rows of tf.vectorized_map": lambda x: tf.vectorized_map(
        lambda row: ctl.random.dropout(row, 0.5), x
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_entries_that_are_not_those_of_rows_are_rejected(name):
    with one_line(r"ctl\.random|before it"):
        run(REJECTED[name], 0, ROWS)


def selected(x):
    kept = tf.boolean_mask(x, tf.range(tf.shape(x)[0]) > 0)
    return layers.Dropout(0.5)(kept, training=True)


# XLA has no shapes as those of selected rows.
@pytest.mark.parametrize(
    ("name", "jit"), [("tiled", False), ("weights", True), ("selected rows", False)]
)
def test_entries_that_are_not_those_of_rows_fail_if_their_number_is_not_static(name, jit):
    function = {**REJECTED, "selected rows": selected}[name]
    error = tf.errors.InvalidArgumentError if jit else ctl.UsageError
    with pytest.raises(error) as caught, explained():
        run(function, 0, ROWS, static=False, jit=jit)
    assert jit or re.match(r"(Layer|ctl.random).*share\.$", str(caught.value))


def test_shared_numbers_are_those_of_every_split():
    def draw(x):
        mask = ctl.random.dropout(KERNEL, 0.5, shared=True)
        return tf.concat([tf.reshape(mask, [-1]), [ctl.random.uniform([], shared=True)]], axis=0)

    assert np.array_equal(run(draw, 0, ROWS), run(draw, 3, 4))


def test_variables_of_a_layer_that_is_built_in_a_step_are_not_keyed_by_rows():
    class Late(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = None

        def call(self, inputs):
            if self.dense is None:
                self.dense = layers.Dense(7, kernel_initializer="glorot_uniform")
            return self.dense(inputs)

    late = Late()
    run(lambda x: late(x)[:, 0], 0, ROWS)
    assert late.dense.kernel.shape == [FEATURES, 7]
