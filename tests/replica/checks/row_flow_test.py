"""Ops keep the rows of a batch apart, or combine them."""

import pytest
import tensorflow as tf

from ctl.replica.checks.row_flow import Mixed, RowFlow, Rows

ROWS = 4
ONES = tf.ones([4, 4])
IMAGE = tf.ones([4, 4, 4, 4])
KERNEL = tf.ones([2, 2, 4, 4])
STATISTICS = {"scale": tf.ones([4]), "offset": tf.ones([4])}


def normalized(x, training, **arguments):
    arguments = {**STATISTICS, "mean": tf.ones([4]), "variance": tf.ones([4]), **arguments}
    return tf.compat.v1.nn.fused_batch_norm(x, **arguments, is_training=training)[0]


def image(x):
    return x[:, tf.newaxis, tf.newaxis, :] * IMAGE


KEPT = {  # x is [4 rows, 4]
    "bias": lambda x: tf.nn.bias_add(x, ONES[0]),
    "convolution": lambda x: tf.nn.conv2d(image(x), KERNEL, 1, "SAME"),
    "normalization by given statistics": lambda x: normalized(image(x), False),
    "sum of the columns": lambda x: tf.reduce_sum(x, 1),
    "largest column": lambda x: tf.argmax(x, 1),
    "last columns": lambda x: x[..., 2:],
    "folded columns": lambda x: tf.reshape(tf.reshape(x, [8, 2]) @ ONES[:2], [4, 8]),
    "product with a matrix": lambda x: x @ ONES,
    "product with a transposed matrix": lambda x: tf.matmul(x, ONES, transpose_b=True),
    "product of matrices of rows": lambda x: x[:, :, tf.newaxis] @ x[:, tf.newaxis],
    "contraction of the columns": lambda x: tf.einsum("rc,cd->rd", x, ONES),
    "cumulative sum of the columns": lambda x: tf.cumsum(x, 1),
    "rolled columns": lambda x: tf.roll(x, 1, 1),
    "softmax of the columns": tf.nn.softmax,
    "entries of a table": lambda x: tf.gather(ONES, tf.cast(x, tf.int32)),
    "columns by row": lambda x: tf.gather(x, tf.cast(x, tf.int32), axis=1, batch_dims=1),
}
COMBINED = {
    "bias that depends on rows": lambda x: tf.nn.bias_add(x, x[:, 0]),
    "only the bias depends on rows": lambda x: tf.nn.bias_add(ONES, x[:, 0]),
    "kernel that depends on rows": lambda x: tf.nn.conv2d(
        IMAGE[..., :1], tf.reshape(x, [4, 4, 1, 1]), 1, "SAME"
    ),
    "normalization by statistics of the batch": lambda x: normalized(image(x), True),
    "scale that depends on rows": lambda x: normalized(image(x), False, scale=x[:, 0]),
    "sum of the rows": lambda x: tf.reduce_sum(x, 0),
    "largest row": lambda x: tf.argmax(x, 0),
    "contracted rows": lambda x: ONES @ x,
    "contracted transposed rows": lambda x: tf.matmul(x, ONES, transpose_a=True),
    "pairs of rows": lambda x: tf.matmul(x, x, transpose_b=True),
    "contracted label": lambda x: tf.einsum("rc,rd->cd", x, ONES),
    "cumulative sum of the rows": lambda x: tf.cumsum(x, 0),
    "rolled rows": lambda x: tf.roll(x, 1, 0),
    "softmax of the rows": lambda x: tf.nn.softmax(tf.transpose(x)),
    "broadcast to other rows": lambda x: x[:, 0] * ONES,
    "first row": lambda x: x[0],
    "reversed rows": lambda x: x[::-1],
    "exchanged axes": lambda x: x[tf.newaxis][0],
    "groups of rows": lambda x: tf.reduce_sum(tf.reshape(x, [2, 2, 4]), 1),
    "entries of the batch": lambda x: tf.gather(x, tf.cast(x[:, 0], tf.int32)),
}


def state_of(function):
    trace = tf.function(function).get_concrete_function(tf.TensorSpec([ROWS, 4]))
    flow = RowFlow({id(trace.inputs[0]): Rows()}, count=ROWS)
    return flow.state(trace.outputs[0])


@pytest.mark.parametrize("name", KEPT)
def test_rows_stay_apart(name):
    assert state_of(KEPT[name]) == Rows()


@pytest.mark.parametrize("name", COMBINED)
def test_rows_are_combined(name):
    assert isinstance(state_of(COMBINED[name]), Mixed)
