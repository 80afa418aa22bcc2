"""The order in which the parts of a step run."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from ctl.graphs import order
from ctl.update.microbatches import Inputs, MicroBatches, Target
from tests.support.optimized_graph import ancestors, optimized_nodes

COUNT = 6


def marked(kernel):
    """A layer x -> x @ kernel with an op that Grappler keeps in each of its passes."""

    def mark(x):
        # Not stateful: TensorFlow runs stateful operations in the order of the code in any case.
        marked = tf.numpy_function(lambda x: x, [x], x.dtype, stateful=False)
        return tf.ensure_shape(marked, x.shape)

    @tf.custom_gradient
    def layer(x, kernel):
        def backward(dy):
            dy = mark(dy)
            return tf.matmul(dy, kernel, transpose_b=True), tf.matmul(x, dy, transpose_a=True)

        return mark(tf.matmul(x, kernel)), backward

    return lambda x: layer(x, kernel.read_value())


def make_micro_batches(forward, variables, *, count=COUNT, **options):
    return MicroBatches(
        count=count,
        loss_fn=lambda batch, outputs: tf.reduce_sum(tf.square(outputs), axis=1),
        forward=forward,
        targets=[Target(variables, None, lambda: [])],
        dtype=tf.float32,
        calls={},
        **{"keep_shards": False, **options},
    )


def inputs_of(x):
    return Inputs({"x": x}, None, {"": None}, {"": tf.constant(float(len(x)))}, 0, 0, [None])


@pytest.mark.parametrize("keep_shards", [False, True])
def test_a_micro_batch_runs_after_the_gradients_of_the_one_before(keep_shards):
    kernel = tf.Variable(tf.ones([4, 4]))
    layer = marked(kernel)
    compute = make_micro_batches(lambda b: layer(b["x"]), [kernel], keep_shards=keep_shards)
    step = tf.function(lambda x: compute(inputs_of(x)).gradients)
    nodes = optimized_nodes(step, tf.ones([24, 4]))
    # Numbered in the order of the code: forward and backward pass of each micro-batch in turn.
    marks = [node for node in nodes.values() if node.op == "PyFuncStateless"]
    marks.sort(key=lambda node: int(node.attr["token"].s.split(b"_")[-1]))
    assert len(marks) == 2 * COUNT
    for earlier, later in itertools.pairwise(marks):
        assert earlier.name in ancestors(nodes, later.name)


def test_gradients_have_the_bits_of_a_sum_in_the_order_of_the_micro_batches():
    count = 5
    rng = np.random.default_rng(count)
    kernels = [tf.Variable(rng.normal(size=[8, 8]), dtype=tf.float32) for _ in range(3)]

    def forward(batch):
        x = batch["x"]
        for kernel in kernels:
            x = tf.tanh(x @ kernel)
        return x

    x = tf.constant(rng.normal(size=[60, 8]), tf.float32)
    # The gradients of each micro-batch, in a graph of its own, added by NumPy.
    one = make_micro_batches(forward, kernels, count=1)
    gradients = tf.function(
        lambda rows: one(inputs_of(rows)._replace(denominators={"": 60.0})).gradients[0]
    )
    sums, *parts = [[g.numpy() for g in gradients(rows)] for rows in tf.split(x, count)]
    for part in parts:
        sums = [a + b for a, b in zip(sums, part, strict=True)]
    compute = make_micro_batches(forward, kernels, count=count)
    actual = tf.function(lambda: compute(inputs_of(x)).gradients[0])()
    for a, b in zip(actual, sums, strict=True):
        np.testing.assert_array_equal(a.numpy(), b)


def test_xla_cannot_move_a_micro_batch_before_the_one_before():
    kernel = tf.Variable(tf.ones([4, 4]))
    compute = make_micro_batches(lambda b: b["x"] @ kernel, [kernel], count=3, compiled=True)
    step = tf.function(lambda x: compute(inputs_of(x)).gradients, jit_compile=True)
    x = tf.ones([6, 4])
    text = step.experimental_get_compiler_ir(x)(stage="hlo")
    assert text.count("opt-barrier(") == 2
    np.testing.assert_array_equal(step(x)[0][0], tf.fill([4, 4], 8.0))


def test_xla_compiles_sparse_gradients_whose_size_is_not_static():
    table = tf.Variable(tf.ones([5, 2]))

    def forward(batch):
        indexes, places = tf.unique(batch["x"])
        return tf.gather(tf.gather(table, indexes), places)

    compute = make_micro_batches(forward, [table], count=2, compiled=True)

    @tf.function(jit_compile=True)
    def step(x):
        return tf.convert_to_tensor(compute(inputs_of(x)).gradients[0][0])

    gradient = step(tf.constant([0, 0, 3, 3, 3, 1]))
    np.testing.assert_allclose(gradient[:, 0], np.array([2, 1, 0, 3, 0]) / 3, rtol=1e-6)


def test_nothing_is_added_if_nothing_runs_earlier():
    with order.run_after([None], "values", compiled=True) as values:
        assert values == "values"
