"""Where ops that compute keep the rows of a batch, or that they combine them."""

import pytest
import tensorflow as tf

from ctl.checks.row_flow import Mixed, RowFlow
from ctl.checks.row_rules import Place

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


KEPT = {  # the axis of the rows in the result; x is [4 rows, 4]
    "bias": (lambda x: tf.nn.bias_add(x, ONES[0]), 0),
    "convolution": (lambda x: tf.nn.conv2d(image(x), KERNEL, 1, "SAME"), 0),
    "normalization by given statistics": (lambda x: normalized(image(x), False), 0),
    "sum of the columns": (lambda x: tf.reduce_sum(x, 1), 0),
    "sum of an axis before the rows": (lambda x: tf.reduce_sum(x[tf.newaxis], 0), 0),
    "views of the rows": (lambda x: tf.split(tf.nn.relu(tf.concat([x, x], 0)), 2)[1], 0),
    "views on an axis of their own": (lambda x: tf.reshape(tf.concat([x, x], 0), [2, 4, 4]), 1),
    "kept sum": (lambda x: tf.reduce_sum(x[tf.newaxis], 0, keepdims=True), 1),
    "element of an axis before the rows": (lambda x: x[tf.newaxis][0], 0),
    "largest column": (lambda x: tf.argmax(x, 1), 0),
    "product with a matrix": (lambda x: x @ ONES, 0),
    "product with a transposed matrix": (lambda x: tf.matmul(x, ONES, transpose_b=True), 0),
    "product of a matrix and transposed rows": (lambda x: tf.matmul(ONES, x, transpose_b=True), 1),
    "product of matrices of rows": (lambda x: x[:, :, tf.newaxis] @ x[:, tf.newaxis], 0),
    "contraction of the columns": (lambda x: tf.einsum("rc,cd->dr", x, ONES), 1),
    "cumulative sum of the columns": (lambda x: tf.cumsum(x, 1), 0),
    "rolled columns": (lambda x: tf.roll(x, 1, 1), 0),
    "softmax of the columns": (tf.nn.softmax, 0),
}
COMBINED = {
    "rows and others": lambda x: tf.concat([x, ONES], 0),
    "halves of the rows": lambda x: tf.split(x, 2)[0],
    "product of views": lambda x: tf.concat([x, x], 0) @ tf.concat([x, x], 0)[:4],
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
    "quantized by the range of the batch": lambda x: tf.quantization.quantize_and_dequantize_v2(
        x, 0.0, 0.0, range_given=False
    ),
    "mean of bytes": lambda x: tf.reduce_mean(tf.cast(tf.bitcast(x, tf.uint8), tf.float32), 0),
}


def state_of(function):
    trace = tf.function(function).get_concrete_function(tf.TensorSpec([ROWS, 4]))
    flow = RowFlow({id(trace.inputs[0]): Place(0)}, count=ROWS)
    return flow.state(trace.outputs[0])


@pytest.mark.parametrize("name", KEPT)
def test_rows_stay_apart(name):
    function, axis = KEPT[name]
    assert state_of(function) == Place(axis)


@pytest.mark.parametrize("name", COMBINED)
def test_rows_are_combined(name):
    assert isinstance(state_of(COMBINED[name]), Mixed)
