"""Which tensors of a graph are computed from others."""

import tensorflow as tf

from ctl.replica.graphs.dataflow import depends_on


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
