"""The sources of a tensor, and the rows on its axis 0, are read from the ops."""

import pytest
import tensorflow as tf

from ctl.graphs import dataflow
from ctl.graphs.dataflow import depends_on


def test_dependence_is_followed_through_operations_functions_and_enclosing_graphs():
    variable = tf.Variable([1.0, 2.0])
    constant = tf.constant(3.0)  # captured as a placeholder

    @tf.function
    def double(x):
        return 2 * x

    @tf.function
    def step(rows):
        variable.assign(rows)
        cube, penalty = double(rows) ** 3, constant * tf.reduce_sum(variable**2)
        assert depends_on(rows, [rows])
        assert depends_on(tf.reduce_sum(tf.stack([cube, variable])), [rows])
        assert not depends_on(penalty, [rows, cube])
        assert not depends_on(tf.zeros(tf.shape(rows)), [rows])  # the shape is static

        @tf.function
        def inner():
            assert depends_on(cube + 1, [rows])
            assert not depends_on(penalty + 1, [rows])
            return cube + penalty

        return tf.cond(cube[0] > 0, inner, lambda: cube)

    step(tf.ones([2]))


def test_eager_tensors_depend_on_nothing():
    rows = tf.ones([2])
    assert not depends_on(2 * rows, [rows])


# Axis 0 of a tensor.


ROWS, TIME, FEATURES = 6, 3, 4
SHOWN = {
    "rows": (lambda x: tf.nn.relu(x), 1),
    "folded time": (lambda x: tf.reshape(x, [-1, FEATURES]), TIME),
    "folded and computed": (lambda x: tf.reshape(x, [-1, FEATURES]) @ tf.ones([FEATURES, 5]), TIME),
    "all elements": (lambda x: tf.reshape(x, [-1]), TIME * FEATURES),
}
KERNEL = tf.Variable(tf.ones([ROWS, 2]))
NOT_SHOWN = {
    "a variable of as many rows": lambda x: tf.reshape(KERNEL * tf.reduce_mean(x), [-1]),
    "another axis of that size": lambda x: tf.reshape(
        tf.reduce_mean(tf.reshape(x, [ROWS, 2, ROWS]), axis=0), [-1]
    ),
    "segments": lambda x: tf.repeat(
        tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0, 0], tf.int32), ROWS), 2, axis=0
    ),
    "time first": lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, FEATURES]),
    "tiled": lambda x: tf.tile(x, [2, 1, 1]),
    "weights": lambda x: tf.ones([2 * ROWS, 3]) + 0.0,
}


def entries(function, static):
    results = []

    @tf.function(input_signature=[tf.TensorSpec([ROWS if static else None, TIME, FEATURES])])
    def step(x):
        count = ROWS if static else tf.shape(x)[0]
        results.append(dataflow.find_fold(function(x), count))

    step.get_concrete_function()
    return results[0]


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("name", SHOWN)
def test_entries_of_a_row_are_counted(name, static):
    function, expected = SHOWN[name]
    assert entries(function, static) == (1, expected)


@pytest.mark.parametrize("static", [True, False])
def test_views_of_the_rows_are_counted(static):
    def views(x):
        return tf.concat([x, tf.concat([x + 1.0, tf.nn.relu(x)], axis=0)], axis=0)

    assert entries(lambda x: tf.nn.relu(views(x)), static) == (3, 1)
    assert entries(lambda x: tf.reshape(views(x), [-1, FEATURES]) + 1.0, static) == (3, TIME)


def test_repeated_rows_and_rows_at_constant_places_are_shown():
    assert entries(lambda x: tf.repeat(x, 2, axis=0), static=True) == (1, 2)
    assert entries(lambda x: tf.reshape(tf.gather(x, range(ROWS)), [-1, FEATURES]), True) == (
        1,
        TIME,
    )


@pytest.mark.parametrize("name", NOT_SHOWN)
def test_other_axes_are_not_those_of_rows(name):
    assert entries(NOT_SHOWN[name], static=True) is None


def test_captured_tensor_is_that_of_the_outer_graph():
    @tf.function(input_signature=[tf.TensorSpec([2])])
    def outer(x):
        @tf.function
        def inner():
            result = y + 0.0
            (placeholder,) = (inner for _, inner in result.graph.captures)
            assert dataflow.captured(placeholder) is x
            return result

        y = x
        return inner()

    outer.get_concrete_function()
