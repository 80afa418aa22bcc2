"""Sums the contributions of the replicas to a step: gradients, losses and denominators.

TensorFlow splits each batched all-reduce into packs, beginning with the gradients of the last layer. A
pack depends only on its own gradients, so it is sent while the backward pass computes the gradients of
earlier layers, if `runtime.all_reduce.bucket_mib` or the size of the model makes several packs.

Every replica must call these functions in the same order, in a replica context.
"""

from collections.abc import Sequence
import functools

import tensorflow as tf

from ctl.rows import replicas
from ctl.rows.replicas import sum_over_replicas
from ctl.update.gradients import Gradient, map_values


def all_reduce(
    gradients: Sequence[Gradient], loss: tf.Tensor, *, dtype: tf.DType | None = None
) -> tuple[list[Gradient], tf.Tensor]:
    """Sums gradients and loss over the replicas, in one batched all-reduce.

    Args:
        gradients: this replica's gradients; None for the same variables on every replica.
        loss: this replica's share of the loss.
        dtype: the dtype in which gradients are sent and summed, such as bfloat16; None for their own.
            The loss keeps its own dtype, because it reveals an overflow.

    Returns:
        The gradients and the loss of the global batch, the same on every replica.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients), loss
    existing = [gradient for gradient in gradients if gradient is not None]
    # One call for all tensors: tf.distribute packs them into few transfers, and every replica issues
    # the same collectives in the same order.
    sent = [_cast(gradient, dtype) for gradient in existing] if dtype else existing
    # The sums are not differentiated. Without `stop_gradient`, TensorFlow's all_reduce would search the
    # graphs of all replicas for variables, which takes longer than tracing the step.
    sent = [map_values(value, tf.stop_gradient) for value in (*sent, loss)]
    *reduced, loss = sum_over_replicas(sent)
    results = iter(_cast(new, old.dtype) for new, old in zip(reduced, existing, strict=True))
    return [None if gradient is None else next(results) for gradient in gradients], loss


def sum_in_order(shards: Sequence[Sequence[Gradient]], count: int) -> list[Gradient]:
    """Sums the values of `count` logical shards in the order of the shards.

    Each replica fills its own slots of a [count, ...] buffer and leaves zeros elsewhere. The SUM
    all-reduce then only adds zeros, which is exact, and every replica sums the slots in the same
    order: the result has the same bits on any number of replicas. It sends `count` times the bytes.

    Args:
        shards: the values of each shard of this replica, in the order of the shards. A value is None in
            all shards or in none.
        count: the number of shards of all replicas together.

    Returns:
        The sum of each value, the same on every replica; None for a value that is None.
    """
    context = tf.distribute.get_replica_context()
    places = [i for i, value in enumerate(shards[0]) if value is not None]
    stacks = [tf.stack([tf.convert_to_tensor(shard[i]) for shard in shards]) for i in places]
    if context.num_replicas_in_sync > 1:
        slots = [replicas.own_slot(tf.stop_gradient(stack)) for stack in stacks]
        buffers = [tf.reshape(slot, [count, *slot.shape[2:]]) for slot in slots]
        stacks = sum_over_replicas(buffers)
    sums: list[Gradient] = [None] * len(shards[0])
    # Added one after the other: tf.reduce_sum and tf.add_n choose their own order.
    for i, stack in zip(places, stacks, strict=True):
        sums[i] = functools.reduce(tf.add, tf.unstack(stack, count))
    return sums


def _cast(gradient: tf.Tensor | tf.IndexedSlices, dtype: tf.DType) -> Gradient:
    if gradient.dtype.is_complex:  # a real dtype would drop its imaginary part
        return gradient
    return map_values(gradient, lambda values: tf.cast(values, dtype))
