"""Whether axis 0 holds the rows of the batch is read from the ops."""

import pytest
import tensorflow as tf

from ctl.replica.graphs import row_axis

ROWS, TIME, FEATURES = 6, 3, 4
SHOWN = {
    "rows": (lambda x: tf.nn.relu(x), 1),
    "folded time": (lambda x: tf.reshape(x, [-1, FEATURES]), TIME),
    "folded and computed": (lambda x: tf.reshape(x, [-1, FEATURES]) @ tf.ones([FEATURES, 5]), TIME),
    "all elements": (lambda x: tf.reshape(x, [-1]), TIME * FEATURES),
}
NOT_SHOWN = {
    "time first": lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, FEATURES]),
    "tiled": lambda x: tf.tile(x, [2, 1, 1]),
    "weights": lambda x: tf.ones([2 * ROWS, 3]) + 0.0,
}


def entries(function, static):
    results = []

    @tf.function(input_signature=[tf.TensorSpec([ROWS if static else None, TIME, FEATURES])])
    def step(x):
        count = ROWS if static else tf.shape(x)[0]
        results.append(row_axis.entries_per_row(function(x), count))

    step.get_concrete_function()
    return results[0]


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("name", SHOWN)
def test_entries_of_a_row_are_counted(name, static):
    function, expected = SHOWN[name]
    assert entries(function, static) == expected


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
            assert row_axis.captured(placeholder) is x
            return result

        y = x
        return inner()

    outer.get_concrete_function()
