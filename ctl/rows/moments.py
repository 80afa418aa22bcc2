"""Count, mean and squared deviations of the elements of a global batch, merged over the replicas.

Each replica computes them from its own elements. One all-reduce shares them, and every replica merges
them in the same order, to the same bits (Chan, Golub, LeVeque 1983, "Algorithms for computing the sample
variance: analysis and recommendations", The American Statistician 37(3); their merge of two parts,
written for any number of parts):

    n = sum_r n_r,   mean = sum_r n_r mean_r / n,   M2 = sum_r M2_r + sum_r n_r (mean_r - mean)^2

The variance is M2 / n, never E[x^2] - E[x]^2, which loses all digits of a variance that is much smaller
than the squared mean. A mean is kept as two numbers, the rounded mean and its rounding error.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from ctl.rows import replicas, waits


class Moments(NamedTuple):
    """Statistics of a set of elements, in each of C channels."""

    count: tf.Tensor  # scalar: the number of elements per channel
    shift: tf.Tensor  # [C]: the rounded mean
    error: tf.Tensor  # [C]: the exact mean minus the rounded mean
    squares: tf.Tensor  # [C]: the sum of squared deviations from the mean


def local_moments(
    x: tf.Tensor, included: tf.Tensor | None, axes: Sequence[int]
) -> tuple[tf.Tensor, Moments]:
    """Computes the shift, shaped to broadcast, and the statistics of this replica's elements.

    This is the corrected two-pass algorithm (Chan et al. 1983): the mean of the deviations from the
    rounded mean corrects both the mean and the sum of squares.

    Args:
        x: [rows, ...] elements.
        included: bool mask of the leading axes of x; None for all elements.
        axes: the axes to reduce.

    Returns:
        The rounded mean, of the rank of x, and the statistics. No gradient flows through either.
    """
    elements = tf.reduce_prod(tf.gather(tf.shape(x, out_type=tf.int64), axes))
    if included is not None:
        positions = tf.maximum(tf.size(included, out_type=tf.int64), 1)
        elements = elements // positions * tf.math.count_nonzero(included)
    count = tf.cast(elements, x.dtype)
    divisor = tf.maximum(count, 1)  # a replica can be without rows
    # Constants for the tape: the custom gradient of the normalization contains their derivatives.
    shift = tf.stop_gradient(sum_over(zero_outside(included, x), axes) / divisor)
    deviations = tf.stop_gradient(zero_outside(included, x - shift))
    excess = sum_over(deviations, axes)
    squares = tf.maximum(sum_over(tf.square(deviations), axes) - excess * (excess / divisor), 0)
    values = [tf.reshape(v, [-1]) for v in (shift, excess / divisor, squares)]
    return shift, Moments(count, *values)


def merge(local: Moments) -> Moments:
    """Merges the statistics of all replicas, to the same bits on every replica.

    Args:
        local: this replica's statistics.

    Returns:
        The statistics of the global batch.
    """
    context = replicas.replica_context()
    if context is None:
        return local
    channels = local.shift.shape[0]
    row = tf.concat([[local.count], *local[1:]], axis=0)
    # Nothing is differentiated through the statistics (`batch_norm` has its own gradient). Without
    # `stop_gradient`, `all_reduce` would search the graph of all earlier layers, on every replica.
    own_row = tf.stop_gradient(replicas.own_slot(row))
    table = context.all_reduce(tf.distribute.ReduceOp.SUM, own_row)
    waits.observe(own_row, table)
    counts, shifts, errors, squares = tf.split(table, [1, channels, channels, channels], axis=1)
    count = tf.reduce_sum(counts)
    fraction = counts / tf.maximum(count, 1)
    shift = tf.reduce_sum(fraction * shifts, axis=0)
    means = (shifts - shift) + errors  # relative to the rounded global mean, hence small
    error = tf.reduce_sum(fraction * means, axis=0)
    between = counts * tf.square(means - error)
    return Moments(count, shift, error, tf.reduce_sum(squares + between, axis=0))


def sum_over(values: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Sums over axes and keeps them with size 1."""
    # One axis at a time: for several axes a CPU adds term by term into one number, and on 128 images of
    # 112 x 112 with values near 1000 the mean is then off by 15.
    for axis in reversed(axes):
        values = tf.reduce_sum(values, axis, keepdims=True)
    return values


def zero_outside(mask: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor:
    """Replaces values by 0 (False for bool) where a mask of the leading axes is False."""
    if mask is None:
        return values
    ones = tf.ones([values.shape.rank - mask.shape.rank], tf.int32)
    mask = tf.reshape(mask, tf.concat([tf.shape(mask), ones], axis=0))
    # Not a product: padding can be NaN, and 0 x NaN is NaN.
    # Not a scalar zero: with it the layout optimizer of TensorFlow fails on GPUs.
    return tf.where(mask, values, tf.zeros_like(values))
