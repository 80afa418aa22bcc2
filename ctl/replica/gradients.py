"""Accumulate, all-reduce, clip, apply: in that order.

Sparse gradients (`tf.IndexedSlices`, of embeddings) stay sparse through every stage. A gradient that
is None (the loss does not depend on the variable) stays None and is left out of the update.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from ctl.options import Clip

Gradient: TypeAlias = Any  # a tf.Tensor, tf.IndexedSlices, or None; TensorFlow has no types


def accumulate(
    loss_parts: Sequence[Callable[[], tf.Tensor]], variables: Sequence[tf.Variable]
) -> tuple[list[Gradient], tf.Tensor]:
    """Sums the losses of the micro-batches and their gradients.

    Unrolled in Python, because a collective inside `tf.while_loop` (of a synchronized batch
    normalization) breaks under tf.distribute; a micro-batch's activations are freed before the next.

    Args:
        loss_parts: one callable a micro-batch, each returning its scalar share of the loss.
        variables: what to differentiate by.

    Returns:
        The gradients, one a variable, and the sum of the losses.
    """
    gradients: list[Gradient] = [None] * len(variables)
    losses = []
    for part in loss_parts:
        with tf.GradientTape() as tape:
            loss = part()
        found = tape.gradient(loss, variables)
        gradients = [_add(one, two) for one, two in zip(gradients, found, strict=True)]
        losses.append(loss)
    return gradients, losses[0] if len(losses) == 1 else tf.add_n(losses)


def all_reduce(gradients: Sequence[Gradient], loss: tf.Tensor) -> tuple[list[Gradient], tf.Tensor]:
    """Sums gradients and loss over the replicas: one batched reduction a step.

    Args:
        gradients: this replica's, None where there is none (on every replica alike).
        loss: this replica's share of the loss.

    Returns:
        The gradients and the loss of the global batch, the same on every replica.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients), loss
    there = [gradient for gradient in gradients if gradient is not None]
    *reduced, loss = context.all_reduce(tf.distribute.ReduceOp.SUM, [*there, loss])
    following = iter(reduced)
    return [None if gradient is None else next(following) for gradient in gradients], loss


def clip(gradients: Sequence[Gradient], rule: Clip) -> list[Gradient]:
    """Clips reduced gradients.

    Rows of a sparse gradient that stand for the same variable row are summed first: the norm of
    the unsummed rows would depend on how the batch was split.

    Args:
        gradients: the gradients of the global batch.
        rule: what to clip by.

    Returns:
        The clipped gradients.
    """
    if not (rule.global_norm or rule.norm or rule.value):
        return list(gradients)
    summed = [_sum_rows(gradient) for gradient in gradients]
    if rule.global_norm:
        return list(tf.clip_by_global_norm(summed, rule.global_norm)[0])
    if rule.norm:
        return [_on_values(g, lambda v: tf.clip_by_norm(v, rule.norm)) for g in summed]
    return [_on_values(g, lambda v: tf.clip_by_value(v, -rule.value, rule.value)) for g in summed]


def apply(
    optimizer: tf.Module, gradients: Sequence[Gradient], variables: Sequence[tf.Variable]
) -> None:
    """Applies reduced gradients, as they are, to every replica's copy of the variables.

    Args:
        optimizer: a tf_keras optimizer.
        gradients: the gradients of the global batch, None for a variable to leave alone.
        variables: the variables, in the same order.
    """
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if pairs:
        # The argument's old name, which LossScaleOptimizer and the legacy optimizers take too.
        optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)


def _add(one: Gradient, two: Gradient) -> Gradient:
    if one is None or two is None:
        return two if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(two, tf.IndexedSlices):
        return tf.IndexedSlices(
            values=tf.concat([one.values, two.values], axis=0),
            indices=tf.concat([one.indices, two.indices], axis=0),
            dense_shape=one.dense_shape,
        )
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(two)


def _sum_rows(gradient: Gradient) -> Gradient:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, position = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, position, tf.size(indices))
    return tf.IndexedSlices(values=values, indices=indices, dense_shape=gradient.dense_shape)


def _on_values(gradient: Gradient, change: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            values=change(gradient.values),
            indices=gradient.indices,
            dense_shape=gradient.dense_shape,
        )
    return change(gradient)
