"""The gradients and the loss of the global batch, from the contributions of the replicas."""

from collections.abc import Sequence

import tensorflow as tf

from ctl.replica.arithmetic import gradients, reduction, waits
from ctl.replica.step.microbatches import Contributions
from ctl.replica.step.plan import Plan
from ctl.replica.updates.compression import Compression, Reduced


def reduce_contributions(
    contributions: Contributions,
    variables: Sequence[tf.Variable],
    loss_scale: tf.Tensor | None,
    *,
    plan: Plan,
    compression: Compression | None,
) -> Reduced:
    """Sums the contributions of the replicas, and unscales the gradients.

    Call it in a replica context, on every replica.

    Args:
        contributions: this replica's contributions.
        variables: the variables of the gradients.
        loss_scale: the scale of the gradients; None if they are not scaled.
        plan: the resolved options.
        compression: reduces compressed gradients; None if the options do not ask for it.
    """
    shards = plan.options.logical_shards
    values, losses = contributions.gradients, contributions.losses
    if compression and compression.is_active:
        return compression.reduce(values[0], losses[0], variables, loss_scale=loss_scale)
    if shards:
        # The loss is one more value of each shard, so that its bits do not depend on the replicas.
        rows = [[*each, share] for each, share in zip(values, losses, strict=True)]
        *reduced, loss = reduction.sum_in_order(rows, shards)
    else:
        reduced, loss = reduction.all_reduce(values[0], losses[0], dtype=plan.reduce_dtype)
    waits.observe((values, losses), (reduced, loss))
    # Before the check and the clipping, because a bound applies to the unscaled gradient.
    if loss_scale is not None:
        reduced = gradients.unscale(reduced, loss_scale)
    return Reduced(reduced, loss, [])
