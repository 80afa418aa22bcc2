"""Accumulate, all-reduce, unscale, check, clip, apply: in that order.

Sparse gradients (`tf.IndexedSlices`, of embeddings) stay sparse, but where they are added to dense
ones or summed in the order of shards. A gradient that is None (the loss does not depend on the
variable) stays None and is left out of the update.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, TypeAlias

import tensorflow as tf

from ctl.configs.options import Clip

Gradient: TypeAlias = Any  # a tf.Tensor, tf.IndexedSlices, or None; TensorFlow has no types


def accumulate(parts: Sequence[Sequence[Gradient]]) -> list[Gradient]:
    """Sums the gradients of micro-batches.

    Args:
        parts: for each micro-batch its gradients, one a variable.

    Returns:
        The sums, one a variable.
    """
    result = list(parts[0])
    for part in parts[1:]:
        result = [_add(one, two) for one, two in zip(result, part, strict=True)]
    return result


def all_reduce(
    gradients: Sequence[Gradient], loss: tf.Tensor, *, dtype: tf.DType | None = None
) -> tuple[list[Gradient], tf.Tensor]:
    """Sums gradients and loss over the replicas, batched into one call.

    Args:
        gradients: this replica's, None where there is none (on every replica alike).
        loss: this replica's share of the loss.
        dtype: what gradients travel in, such as bfloat16; None for as they are. The loss, which
            tells an overflow, travels as it is.

    Returns:
        The gradients and the loss of the global batch, the same on every replica.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients), loss
    there = [gradient for gradient in gradients if gradient is not None]
    sent = [_cast(gradient, dtype) for gradient in there] if dtype else there
    *reduced, loss = context.all_reduce(tf.distribute.ReduceOp.SUM, [*sent, loss])
    following = iter(_cast(new, old.dtype) for new, old in zip(reduced, there, strict=True))
    return [None if gradient is None else next(following) for gradient in gradients], loss


def sum_in_order(shards: Sequence[Sequence[Gradient]], count: int) -> list[Gradient]:
    """Sums the values of `count` shards in the order of the shards, whoever computed them.

    Each replica fills its own slots of a [count, ...] buffer, zeros elsewhere; a SUM all-reduce
    then only adds zeros, which is exact, and every replica sums the slots in the same order: the
    result has the same bits on any number of replicas. It sends `count` times the bytes.

    Args:
        shards: for each shard of this replica, in order, its values; None in all or in none.
        count: the shards of all replicas.

    Returns:
        The sums.
    """
    context = tf.distribute.get_replica_context()
    there = [i for i, value in enumerate(shards[0]) if value is not None]
    mine = [tf.stack([tf.convert_to_tensor(shard[i]) for shard in shards]) for i in there]
    if context.num_replicas_in_sync > 1:
        before = context.replica_id_in_sync_group * len(shards)
        mine = [_in_slots(stack, before, count) for stack in mine]
        mine = list(context.all_reduce(tf.distribute.ReduceOp.SUM, mine))
    result: list[Gradient] = [None] * len(shards[0])
    for i, slots in zip(there, mine, strict=True):
        result[i] = functools.reduce(tf.add, tf.unstack(slots, count))
    return result


def unscale(gradients: Sequence[Gradient], loss_scale: tf.Tensor) -> list[Gradient]:
    """Divides reduced gradients by the loss scale."""
    return [_on_values(g, lambda v: v / tf.cast(loss_scale, v.dtype)) for g in gradients]


def finite_flags(gradients: Sequence[Gradient], loss: tf.Tensor) -> tf.Tensor:
    """Whether the loss, and each gradient, is finite: [1 + gradients] bool, True for None.

    The loss is looked at too: an infinite loss can leave finite gradients.
    """
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return tf.stack(
        [
            tf.constant(True) if value is None else tf.reduce_all(tf.math.is_finite(value))
            for value in (loss, *values)
        ]
    )


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
    summed = [sum_rows(gradient) for gradient in gradients]
    if rule.global_norm:
        return list(tf.clip_by_global_norm(summed, rule.global_norm)[0])
    if rule.norm:
        return [_on_values(g, lambda v: tf.clip_by_norm(v, rule.norm)) for g in summed]
    return [_on_values(g, lambda v: tf.clip_by_value(v, -rule.value, rule.value)) for g in summed]


def apply(optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[tf.Variable]) -> None:
    """Applies reduced gradients, as they are, to every replica's copy of the variables.

    Args:
        optimizer: a tf_keras optimizer.
        gradients: the gradients of the global batch, None for a variable to leave alone.
        variables: the variables, in the same order.
    """
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if pairs:
        # The argument's old name, which the legacy optimizers take too.
        optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)


def unless(finite: tf.Tensor, told: Sequence[tf.Tensor], then: Callable[..., Any]) -> None:
    """Calls something once, across replicas, where a step is not finite.

    Args:
        finite: scalar bool, the same on every replica.
        told: what `then` is called with, the same on every replica.
        then: called across replicas; it may change variables.
    """

    def decide(strategy: tf.distribute.Strategy, finite: Any, told: Any) -> None:
        def call() -> None:
            then(*(strategy.experimental_local_results(value)[0] for value in told))

        tf.cond(strategy.experimental_local_results(finite)[0], lambda: None, call)

    tf.distribute.get_replica_context().merge_call(decide, args=(finite, list(told)))


def apply_if(
    right: tf.Tensor,
    optimizer: Any,
    gradients: Sequence[Gradient],
    variables: Sequence[tf.Variable],
    *,
    overflow: tf.Tensor,
    told: Sequence[tf.Tensor],
    otherwise: Callable[..., Any],
    decided: Callable[[Any], None],
) -> None:
    """Applies reduced gradients on all replicas, or on none.

    A conditional in the replicas' own code would hold the optimizer's collectives, which
    tf.distribute refuses; so the replicas meet, and one conditional decides for all.

    Args:
        right: scalar bool, the same on every replica.
        optimizer: a tf_keras optimizer.
        gradients: the gradients of the global batch, None for a variable to leave alone.
        variables: the variables, in the same order.
        overflow: scalar float, infinity where the gradients overflowed, else 0.
        told: what `otherwise` is called with, the same on every replica.
        otherwise: called across replicas where the update is skipped.
        decided: called across replicas with each replica's `overflow`.
    """
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    there, targets = [g for g, _ in pairs], [v for _, v in pairs]

    def decide(
        strategy: tf.distribute.Strategy, right: Any, overflow: Any, there: Any, told: Any
    ) -> None:
        def update() -> None:
            strategy.run(lambda *values: apply(optimizer, values, targets), args=tuple(there))

        def skip() -> None:
            otherwise(*(strategy.experimental_local_results(value)[0] for value in told))

        tf.cond(strategy.experimental_local_results(right)[0], update, skip)
        decided(overflow)

    context = tf.distribute.get_replica_context()
    context.merge_call(decide, args=(right, overflow, there, list(told)))


def _cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    return _on_values(gradient, lambda values: tf.cast(values, dtype))


def _in_slots(stack: tf.Tensor, before: tf.Tensor, count: int) -> tf.Tensor:
    """[own, ...] -> [count, ...], zeros around."""
    after = count - before - stack.shape[0]
    padding = [[before, after], *[[0, 0]] * (stack.shape.rank - 1)]
    return tf.ensure_shape(tf.pad(stack, padding), [count, *stack.shape[1:]])


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


def sum_rows(gradient: Gradient) -> Gradient:
    """A sparse gradient with one row for each row of the variable; others as they are."""
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
