"""Batch normalization by the statistics of the global batch: the numbers, without layers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.errors import UsageError
from ctl.graphs import passes
from ctl.graphs.dataflow import find_fold
from ctl.rows import moments, replicas, row_mask, waits
from ctl.rows.assertions import require_equal


class Normalized(NamedTuple):
    """A normalized batch, and the statistics of the global batch in each channel."""

    outputs: tf.Tensor  # like the inputs
    count: tf.Tensor  # scalar: the number of elements per channel
    mean: tf.Tensor  # [channels]
    variance: tf.Tensor  # [channels]: M2 / n


def normalize(
    x: tf.Tensor, mask: tf.Tensor | None,
    *, axis: Sequence[int], gamma: tf.Tensor | None, beta: tf.Tensor | None, epsilon: float,
    name: str,
) -> Normalized:  # fmt: skip
    """Normalizes this replica's rows by the statistics of the global batch.

    Args:
        x: [rows, ...], this replica's rows.
        mask: Keras mask, [rows] or [rows, steps, ...], of the positions in the statistics; or None.
        axis: the axes of the channels, not negative.
        gamma: the scale of each channel; None for 1.
        beta: the offset of each channel; None for 0.
        epsilon: is added to the variance.
        name: the name of the layer, for messages.

    Returns:
        The outputs and the statistics. The gradients of the outputs are those of the global batch if
        the loss is the sum of the replicas' contributions.

    Raises:
        UsageError: the statistics cannot be those of the global batch.
    """
    rows = row_mask.current()
    if rows is not None and not rows.normalizes_micro_batches:
        row_mask.require_all(f"Layer {name}")
    existing, included = _masks(x, mask, axis, name)
    axes = [each for each in range(x.shape.rank) if each not in axis]
    # A recomputation uses the statistics of the first pass: it needs no further all-reduce.
    shift, local, merged = passes.keep(lambda: _compute_moments(x, included, axes))
    variance = merged.squares / tf.maximum(merged.count, 1)
    per_channel = [
        tf.ones_like(variance) if gamma is None else gamma,
        tf.zeros_like(variance) if beta is None else beta,
        tf.math.rsqrt(variance + epsilon),
        merged.shift - local.shift + merged.error,
    ]
    gamma, beta, inverse, center = [tf.reshape(v, shift.shape) for v in per_channel]
    statistics = _Statistics(inverse, center, merged.count, existing, included, axes)
    outputs = _normalize(x - shift, gamma, beta, statistics)
    return Normalized(outputs, merged.count, merged.shift + merged.error, variance)


def moving_step(
    variable: tf.Variable, batch: Normalized, value: tf.Tensor, momentum: float
) -> tf.Tensor:
    """Returns what to subtract from a moving statistic.

    Args:
        variable: the moving statistic.
        batch: the normalized batch.
        value: its mean or its variance.
        momentum: the part of the moving statistic that stays.
    """
    step = (variable - tf.reshape(value, variable.shape)) * (1 - momentum)
    # A NaN would stay in a moving average permanently, even if the step is skipped.
    valid = tf.logical_and(batch.count > 0, tf.math.is_finite(step))
    return tf.where(valid, step, tf.zeros_like(step))


def _compute_moments(
    x: tf.Tensor, included: Any, axes: Sequence[int]
) -> tuple[tf.Tensor, moments.Moments, moments.Moments]:
    """Returns this replica's shift, shaped to broadcast, and the local and the global statistics."""
    shift, local = moments.local_moments(x, included, axes)
    return shift, local, moments.merge(local)


class _Statistics(NamedTuple):
    """The statistics that normalize a replica's elements, which are deviations from its shift."""

    inverse: tf.Tensor  # 1 / standard deviation, shaped to broadcast
    center: tf.Tensor  # global mean - this replica's shift, shaped to broadcast
    count: tf.Tensor  # scalar: the number of elements per channel in the global batch
    existing: tf.Tensor | None  # mask of the rows that exist
    included: tf.Tensor | None  # mask of the positions in the statistics
    axes: Sequence[int]  # the axes that the statistics reduce


def _normalize(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, statistics: _Statistics
) -> tf.Tensor:
    """Computes gamma xhat + beta with xhat = (x - center) inverse, and its gradient.

    With means over the global batch the gradient is (Ioffe and Szegedy 2015, the chain rule of section
    3 multiplied out; docs/step.md, section 12, derives it)

        dx = gamma inverse (dy - mean(dy) - xhat mean(dy xhat))

    Elements outside of the statistics have only the first term, and padding has none.
    """

    # A custom gradient needs one reduction of [2, channels] numbers; autodiff would reduce the complete
    # table of `moments.merge` again, [replicas, 3 channels + 1].
    def differentiate(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        inverse, center, count, existing, included, axes = statistics
        dy, rows = moments.zero_outside(existing, dy), moments.zero_outside(existing, x)
        d_beta = moments.sum_over(dy, axes)
        d_gamma = (moments.sum_over(dy * rows, axes) - center * d_beta) * inverse
        sums, context = tf.stack([d_beta, d_gamma]), replicas.replica_context()
        if context:
            # `stop_gradient`, as in `moments.merge`.
            own_sums = tf.stop_gradient(sums)
            sums = context.all_reduce(tf.distribute.ReduceOp.SUM, own_sums)
            waits.observe(own_sums, sums)
        mean_dy, mean_dy_xhat = tf.unstack(sums / tf.maximum(count, 1))
        scale = gamma * inverse
        # xhat is multiplied out: two numbers per channel, and fewer passes over x.
        slope = scale * inverse * mean_dy_xhat
        offset = scale * mean_dy - slope * center
        d_x = scale * dy - moments.zero_outside(included, slope * rows + offset)
        # This replica's d_gamma and d_beta: the step reduces them with all other gradients.
        return _attach_gradient((d_x, d_gamma, d_beta), (dy, x, gamma), second)

    def second(*_: tf.Tensor) -> None:
        raise UsageError(
            "SyncBatchNormalization has no second derivative: use another normalization here."
        )

    scale = gamma * statistics.inverse
    outputs = x * scale + (beta - statistics.center * scale)
    return _attach_gradient((outputs,), (x, gamma, beta), differentiate)[0]


def _attach_gradient(
    values: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], gradient: Callable[..., Any]
) -> tuple[tf.Tensor, ...]:
    """Returns values whose gradient by the inputs is what `gradient` computes."""

    # The values are arguments, too, although they have no gradient: tf.custom_gradient searches the
    # graph from the results back to the arguments for variables. For values that are computed inside,
    # the search visits all earlier layers, and through the collectives those of the other replicas:
    # the first step of ResNet-50 took 3 minutes.
    @tf.custom_gradient
    def attach(*tensors: tf.Tensor) -> tuple[Any, Callable]:
        def backward(*upstream: tf.Tensor) -> Any:
            return (*gradient(*upstream), *[None] * len(values))

        return [tf.identity(value) for value in tensors[len(inputs) :]], backward

    return tuple(attach(*inputs, *values))


def _masks(x: tf.Tensor, mask: tf.Tensor | None, axis: Sequence[int], name: str) -> tuple[Any, Any]:
    """Returns masks of leading axes of x: rows that exist, positions in the statistics; None for all."""
    existing = row_mask.current_mask()
    if existing is not None:
        static, count = existing.shape[0], tf.shape(existing)[0]
        is_known = static is not None and x.shape[0] == static
        fold = None if is_known else find_fold(x, static or count)
        if fold:
            shape = [static or count, *fold]
            existing = fold.entries(tf.broadcast_to(existing[:, tf.newaxis, tf.newaxis], shape))
        problem = (
            f"Layer {name} got another number of rows than the padded batch has: concatenate views of "
            "the rows by ctl.replica.views(a, b), call the model once for each view, or choose a batch "
            "size that needs no padding."
        )
        if not x.shape[:1].is_compatible_with(existing.shape):
            raise UsageError(problem)
        with require_equal(
            tf.shape(x)[0], tf.shape(existing)[0], problem
        ):  # static ones need no op
            existing = tf.cast(existing, tf.bool)
    if mask is None:
        return existing, existing
    rank = mask.shape.rank
    if rank > min(axis):
        raise UsageError(
            f"Layer {name} normalizes axis {min(axis)}, which its Keras mask of shape "
            f"{mask.shape} covers: normalize an axis after those of the mask."
        )
    included = tf.broadcast_to(tf.cast(mask, tf.bool), tf.shape(x)[:rank])
    return existing, moments.zero_outside(existing, included)
