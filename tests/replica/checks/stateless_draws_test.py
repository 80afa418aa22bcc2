"""Stateless draws that are the same on every split are accepted, and others are rejected."""

import pytest
import tensorflow as tf

import ctl
from tests.replica.step.traced_step import FEATURES, ROWS, rejected, trace

SHAPE = (ROWS, FEATURES)


# Draws with a constant seed and a fixed shape are the same on every replica.


def constant(*shape):
    return tf.random.stateless_normal(shape, [1, 2])


KERNEL = tf.Variable(tf.ones([FEATURES, FEATURES]))
TABLE = tf.Variable(tf.ones([16, FEATURES]))
STEP = tf.Variable(3, dtype=tf.int64)
FIXED = {
    "projection": lambda x: x @ constant(FEATURES, ROWS),
    "square projection": lambda x: x @ constant(FEATURES, FEATURES),
    "projection with tensordot": lambda x: tf.tensordot(x, constant(FEATURES, 3), 1),
    "projection with einsum": lambda x: tf.einsum("bi,ij->bj", x, constant(FEATURES, 3)),
    "one vector for all rows": lambda x: x + constant(FEATURES),
    "broadcast row": lambda x: x * constant(1, FEATURES),
    "scalar": lambda x: x * constant(),
    "scalar of the step": lambda x: x * tf.random.stateless_uniform([], tf.stack([0, STEP])),
    "noise of a kernel": lambda x: x @ (KERNEL + 0.1 * constant(FEATURES, FEATURES)),
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
    "added later": lambda x: tf.nn.relu(x @ KERNEL) * (1 + tf.cast(constant(*SHAPE) > 0, x.dtype)),
    "latent": lambda x: constant(*SHAPE) @ KERNEL,
    "concatenated": lambda x: tf.concat([x, constant(ROWS, 3)], axis=1),
    "column": lambda x: x * constant(ROWS, 1),
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


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_fixed_projection_is_accepted_for_every_size_of_micro_batches(columns):
    def step(x):
        half = x[: ROWS // 2]
        return half @ constant(FEATURES, columns) + half[:, :1] * constant(columns)

    trace(step, parts=2)


def test_one_entry_per_row_of_a_micro_batch_is_rejected():
    message = rejected(lambda x: x[: ROWS // 2] * constant(ROWS // 2, 1), parts=2)
    assert "depend on how the batch is split" in message
