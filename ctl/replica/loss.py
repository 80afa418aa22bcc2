"""Per-example losses and weights -> one replica's contribution to the loss of the global batch.

This is the only module that knows the denominator. For a global batch of examples i with losses l_i
and weights w_i, on whichever replica each of them is,

    loss = sum_i w_i l_i / sum_i w_i + regularization

so a replica with the rows R contributes sum_{i in R} w_i l_i / W, where W is the weight of the GLOBAL
batch, and each of the N x M contributions (replicas x micro-batches) contains 1 / (N M) of the
regularization. The plain SUM of all contributions is then the loss, and the sum of their gradients is
its gradient (see "Define the loss function" in TensorFlow's custom-training guide; docs/step.md
derives it).
"""

from collections.abc import Sequence

import tensorflow as tf

from ctl.errors import UsageError


def row_weights(
    sample_weight: tf.Tensor | None, row_mask: tf.Tensor | None, dtype: tf.DType
) -> tf.Tensor | None:
    """Returns the weight of each row in the loss: its sample weight, and 0 for padding.

    Args:
        sample_weight: [rows] sample weights; None for 1.
        row_mask: [rows] mask of the rows that exist; None if all exist.
        dtype: the dtype of the result.

    Returns:
        [rows] weights; None if every row has weight 1.
    """
    if sample_weight is None and row_mask is None:
        return None
    if sample_weight is None:
        return tf.cast(row_mask, dtype)
    # [rows, 1] would broadcast against [rows] losses to [rows, rows], without any error.
    if sample_weight.shape.rank != 1:
        raise UsageError(
            f"sample_weight has shape {sample_weight.shape}, but must be [rows]: return one weight "
            "per example, such as by tf.squeeze."
        )
    weights = tf.cast(sample_weight, dtype)
    return weights if row_mask is None else weights * tf.cast(row_mask, dtype)


def global_weight(
    weights: tf.Tensor | None, rows: int | tf.Tensor, global_batch_size: int, dtype: tf.DType
) -> tf.Tensor:
    """Returns the total weight of the global batch, the denominator of every replica's loss.

    Call it in a replica context, with all rows of the replica, never with those of a micro-batch.

    Args:
        weights: [rows] from `row_weights`, or None.
        rows: the number of rows of this replica; a Python int if it is static.
        global_batch_size: the number of rows of all replicas if the batch is full.
        dtype: the dtype of the result.

    Returns:
        A scalar: a constant if the batch is known to be full and all weights are 1; otherwise the sum
        over the replicas.
    """
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    # Static shapes prove that the batch is full, so the common case needs no communication.
    if weights is None and isinstance(rows, int) and rows * replicas == global_batch_size:
        return tf.constant(global_batch_size, dtype)
    local_weight = tf.cast(rows, dtype) if weights is None else tf.reduce_sum(weights)
    # Before the backward pass: dividing the gradients afterwards would also divide the regularization,
    # and in float16 the gradients of an undivided loss overflow sooner.
    if replicas == 1:
        return local_weight
    return context.all_reduce(tf.distribute.ReduceOp.SUM, local_weight)


def contribution(
    per_example: tf.Tensor, weights: tf.Tensor | None, denominator: tf.Tensor
) -> tf.Tensor:
    """Returns what a micro-batch contributes to the loss of the global batch.

    Args:
        per_example: [rows] losses, not reduced.
        weights: [rows] from `row_weights`, or None.
        denominator: scalar from `global_weight`. If it is zero (all weights are zero), the
            contribution and its gradient are zero.

    Returns:
        A scalar; the sum over all replicas and micro-batches is the loss of the global batch.
    """
    _check_shape(per_example)
    if weights is not None:
        per_example = per_example * tf.cast(weights, per_example.dtype)
    # The gradient of a plain quotient would be NaN for a denominator of zero.
    return tf.math.divide_no_nan(
        tf.reduce_sum(per_example), tf.cast(denominator, per_example.dtype)
    )


def regularization_contribution(
    losses: Sequence[tf.Tensor], parts: int, dtype: tf.DType
) -> tf.Tensor | None:
    """Returns one part of the regularization, which all replicas and micro-batches compute alike.

    Args:
        losses: scalars that depend on the variables alone.
        parts: the number of replicas x the number of micro-batches.
        dtype: the dtype of the result.

    Returns:
        A scalar; None if there are no losses.
    """
    if not losses:
        return None
    for loss in losses:
        if loss.shape.rank not in (0, None):
            raise UsageError(
                f"A regularization loss has shape {loss.shape}, but must be a scalar: return the "
                "losses of examples from per_example_loss, where they are weighted."
            )
    return tf.add_n([tf.cast(loss, dtype) for loss in losses]) / tf.cast(parts, dtype)


def _check_shape(per_example: tf.Tensor) -> None:
    # Already reduced losses would be divided a second time, by the weight of the global batch.
    if per_example.shape.rank != 1:
        raise UsageError(
            f"per_example_loss returned shape {per_example.shape}, but must return [rows]: one loss "
            "per example, not reduced over the batch (ctl divides, once) and reduced over all other "
            "axes."
        )
