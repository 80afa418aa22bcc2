"""Per-example losses and weights -> this replica's share of the global loss.

The only place that knows a denominator. For a global batch of examples i with losses l_i and weights
w_i, wherever they are computed,

    loss = sum_i w_i l_i / sum_i w_i + regularization

so a replica that holds the rows R contributes sum_{i in R} w_i l_i / W with the GLOBAL weight W, and
each of the N x M (replicas x micro-batches) contributions carries 1 / (N M) of the regularization.
The plain SUM of all contributions is then the loss, and their gradients sum to its gradient
(see "Define loss" in TensorFlow's custom-training guide; docs/step.md derives it).
"""

from collections.abc import Sequence

import tensorflow as tf

from ctl.errors import UsageError


def row_weights(
    weight: tf.Tensor | None, present: tf.Tensor | None, dtype: tf.DType
) -> tf.Tensor | None:
    """What each row counts in the loss: its sample weight, and nothing where it is padding.

    Args:
        weight: [rows] sample weights, or None for 1.
        present: [rows] mask of the rows that exist, or None when all do.
        dtype: the dtype of the result.

    Returns:
        [rows] weights, or None when every row counts 1.
    """
    if weight is None and present is None:
        return None
    if weight is None:
        return tf.cast(present, dtype)
    if weight.shape.rank != 1:
        raise UsageError(
            f"sample_weight has shape {weight.shape}, want [rows]: one weight an example, such as by "
            "tf.squeeze."
        )
    weight = tf.cast(weight, dtype)
    return weight if present is None else weight * tf.cast(present, dtype)


def global_weight(
    weights: tf.Tensor | None, rows: int | tf.Tensor, global_batch_size: int, dtype: tf.DType
) -> tf.Tensor:
    """The total weight of the global batch, the denominator of every replica's loss.

    A constant when every row of a full batch counts 1; else summed over the replicas, before the
    backward pass. Call it in a replica context, on the whole batch of the replica, never on a
    micro-batch.

    Args:
        weights: [rows] from `row_weights`, or None.
        rows: how many rows this replica holds, as a Python int where it is known.
        global_batch_size: how many rows all replicas hold together when the batch is full.
        dtype: the dtype of the result.

    Returns:
        A scalar.
    """
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    if weights is None and isinstance(rows, int) and rows * replicas == global_batch_size:
        return tf.constant(global_batch_size, dtype)
    mine = tf.cast(rows, dtype) if weights is None else tf.reduce_sum(weights)
    return mine if replicas == 1 else context.all_reduce(tf.distribute.ReduceOp.SUM, mine)


def share(per_example: tf.Tensor, weights: tf.Tensor | None, denominator: tf.Tensor) -> tf.Tensor:
    """This micro-batch's share of the global loss.

    Args:
        per_example: [rows] losses, not reduced.
        weights: [rows] from `row_weights`, or None.
        denominator: scalar from `global_weight`. Where it is zero (a batch of zero weights only) the
            share is zero, and so is its gradient.

    Returns:
        A scalar; the sum of all replicas' and micro-batches' shares is the loss of the global batch.
    """
    _check_shape(per_example)
    if weights is not None:
        per_example = per_example * tf.cast(weights, per_example.dtype)
    return tf.math.divide_no_nan(
        tf.reduce_sum(per_example), tf.cast(denominator, per_example.dtype)
    )


def regularization_share(
    losses: Sequence[tf.Tensor], parts: int, dtype: tf.DType
) -> tf.Tensor | None:
    """One part of the regularization, which `parts` replicas and micro-batches compute alike.

    Args:
        losses: scalars, each a function of the variables alone.
        parts: replicas x micro-batches.
        dtype: the dtype of the result.

    Returns:
        A scalar, or None where there is nothing to add.
    """
    if not losses:
        return None
    for loss in losses:
        if loss.shape.rank not in (0, None):
            raise UsageError(
                f"A regularization loss has shape {loss.shape}, want a scalar: return losses of "
                "examples from per_example_loss, which weighs them."
            )
    return tf.add_n([tf.cast(loss, dtype) for loss in losses]) / tf.cast(parts, dtype)


def _check_shape(per_example: tf.Tensor) -> None:
    if per_example.shape.rank != 1:
        raise UsageError(
            f"per_example_loss returned shape {per_example.shape}, want [rows]: one loss an example, "
            "not reduced over the batch (ctl divides, once) and reduced over all other axes."
        )
