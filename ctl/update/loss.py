"""Turns losses and weights into one replica's contribution to the loss of the global batch.

For a global batch of examples i, or of their tokens, with losses l_i and weights w_i, wherever each of
them is,

    loss = sum_i w_i l_i / sum_i w_i + regularization

so a replica with the rows R contributes sum_{i in R} w_i l_i / W, where W is the weight of the GLOBAL
batch, and each of the N x M contributions (replicas x micro-batches) contains 1 / (N M) of the
regularization. The plain SUM of all contributions is then the loss, and the sum of their gradients is
its gradient (see "Define the loss function" in TensorFlow's custom-training guide; docs/step.md
derives it).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import math
import pkgutil
import re
from typing import Any, TypeAlias

import tensorflow as tf
import tf_keras

from ctl.configs.error_location import name_function
from ctl.data.autograph import convert
from ctl.data.source import Nest
from ctl.errors import UsageError, type_name
from ctl.graphs import dataflow, ops
from ctl.rows.assertions import require
from ctl.rows.row_mask import current

SampleWeight: TypeAlias = tf.Tensor | Mapping[str, tf.Tensor | None] | None
# As `StandardTrainer.denominator` returns it: one of all losses, or of each by its name.
Denominator: TypeAlias = str | tf.Tensor | Mapping[str, str | tf.Tensor]
OTHER_COUNT = (
    "per_example_loss returned {} losses for {} examples: return one loss per example, reduced over all "
    "other axes, or the losses of all tokens, with weight 0 in sample_weight for those to leave out."
)
# In the names of the penalties of tf_keras; those of the second micro-batch have a number.
_ACTIVITY = re.compile(r"/ActivityRegularizer(_\d+)?/")
_NUMBERS = "ctl.update.denominators:numbers_by_name"  # imported for a loss that has another one
SINGLE = {"": 1.0}  # the factor of a loss that has no name


def weighted_sum(losses: Mapping[str, tf.Tensor], factors: Mapping[str, float]) -> tf.Tensor:
    """Returns the sum of scalar losses, each multiplied by its factor."""
    return tf.add_n([v if factors[k] == 1 else v * factors[k] for k, v in losses.items()])


def weights_by_name(
    sample_weight: SampleWeight,
    names: Iterable[str],
    row_mask: tf.Tensor | None,
    dtype: tf.DType,
) -> dict[str, tf.Tensor | None]:
    """Returns the weights of each loss by its name, as `row_weights`.

    Args:
        sample_weight: the weights of all losses, or a dict of name -> weights.
        names: the names of the losses.
        row_mask: [rows] mask of the rows that exist; None if all exist.
        dtype: the dtype of the result.

    Raises:
        UsageError: the weights have other names than the losses.
    """
    names = list(names)
    if not isinstance(sample_weight, Mapping):
        return dict.fromkeys(names, row_weights(sample_weight, row_mask, dtype))
    if sample_weight.keys() != {*names}:
        raise UsageError(
            f"sample_weight returned weights for {', '.join(sample_weight)}, but loss_weights names "
            f"{', '.join(filter(None, names)) or 'none'}: both must name the same losses."
        )
    return {name: row_weights(sample_weight[name], row_mask, dtype) for name in names}


def compute(
    loss_fn: Callable[..., Nest], batch: Nest, outputs: Nest, factors: Mapping[str, float]
) -> dict[str, tf.Tensor]:
    """Calls the user's loss function.

    Args:
        loss_fn: (batch, outputs) -> [rows, ...] losses, not reduced; or a dict of name -> losses.
        batch: a micro-batch.
        outputs: what the forward pass returned.
        factors: name -> factor of the loss in the sum; `SINGLE` for a loss function with one loss.

    Returns:
        Name -> losses, in the order of the factors.

    Raises:
        UsageError: the losses are reduced, or none, or have other names than the factors, or the
            function takes its arguments in another order. The message has the line of the function.
    """
    name = name_function(loss_fn)
    try:
        losses = convert(loss_fn)(batch, outputs)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        if "losses.Reduction.NONE" in str(error):  # of tf_keras, in a strategy
            raise UsageError(
                f"{name} calls a loss object that averages over the rows of a replica: make it with "
                'reduction="none", since ctl divides, once.'
            ) from error
        is_swapped = False
        with contextlib.suppress(Exception):
            convert(loss_fn)(outputs, batch)
            is_swapped = True
        if not is_swapped:
            raise
        raise UsageError(
            f"{name} fails with (batch, outputs), and not with (outputs, batch): the arguments of a "
            "loss function are (batch, outputs), in this order."
        ) from error
    found = dict(losses) if isinstance(losses, Mapping) else {"": losses}
    if found.keys() != factors.keys():
        returned, named = (", ".join(filter(None, names)) for names in (found, factors))
        example = ", ".join(f"{each}=1.0" for each in found)
        fix = f"set loss_weights=dict({example})" if returned else "return a dict of these losses"
        raise UsageError(
            f"{name} returned {f'the losses {returned}' if returned else 'one loss'}, but loss_weights "
            f"names {named or 'none'}: {fix}."
        )
    for each in found.values():
        # Already reduced losses would be divided a second time, by the weight of the global batch.
        shape = getattr(each, "shape", None)
        if not getattr(shape, "rank", None):
            problem = type_name(each) if shape is None else f"shape {shape}"
            raise UsageError(
                f"{name} returned {problem}, but must return [rows]: one loss per example, not reduced "
                "over the batch, since ctl divides, once. A loss object of Keras takes "
                'reduction="none".'
            )
    return {each: found[each] for each in factors}


def row_weights(
    sample_weight: tf.Tensor | None, row_mask: tf.Tensor | None, dtype: tf.DType
) -> tf.Tensor | None:
    """Returns the weight of each loss: its sample weight, and 0 in rows of padding.

    Args:
        sample_weight: [rows] sample weights, or [rows, ...] for losses of that shape; None for 1.
        row_mask: [rows] mask of the rows that exist; None if all exist.
        dtype: the dtype of the result.

    Returns:
        [rows] weights, or [rows, ...] like the sample weights; None if every row has weight 1.
    """
    if sample_weight is None:
        return masked(None, row_mask, dtype)
    weights = tf.cast(sample_weight, dtype)  # also of an array or a list
    if not weights.shape.rank:
        raise UsageError(
            f"sample_weight has shape {weights.shape}, but must be [rows], or have the shape of the "
            "losses: return one weight per example."
        )
    rows = current()
    if rows is not None:
        rows.trace.weights.append(weights)
    return _not_negative(masked(weights, row_mask, dtype))  # padding has any weight


def masked(
    numbers: tf.Tensor | None, row_mask: tf.Tensor | None, dtype: tf.DType
) -> tf.Tensor | None:
    """Returns [rows, ...] numbers with 0 in rows of padding; None, which stands for 1, if all exist."""
    mask = None if row_mask is None else tf.cast(row_mask, dtype)
    if numbers is None or mask is None:
        return mask if numbers is None else numbers
    return numbers * tf.reshape(mask, [-1] + [1] * (numbers.shape.rank - 1))


def denominator_numbers(
    denominator: Denominator, weights: Mapping[str, tf.Tensor | None], *args: Any, **kw: Any
) -> Mapping[str, tf.Tensor | float | None]:
    """Returns what is summed to the denominator of each loss: the weights, unless the user has chosen.

    Args:
        denominator: "weights", or what else `StandardTrainer.denominator` may return.
        weights: name of a loss -> its weights.
        *args: see `denominators.numbers_by_name`.
        **kw: the same.
    """
    if isinstance(denominator, str) and denominator == "weights":
        return weights
    return pkgutil.resolve_name(_NUMBERS)(denominator, weights, *args, **kw)


def _not_negative(weights: tf.Tensor) -> tf.Tensor:
    """Rejects negative weights: the loss is divided by the sum of the weights, which may cancel them."""
    if ops.is_compiled():  # the host finds the reason for a loss that is not finite
        return tf.where(weights < 0, tf.constant(math.nan, weights.dtype), weights)
    smallest, rows = tf.reduce_min(weights), current()

    def numbers() -> tuple[tf.Tensor, tf.Tensor]:
        row = tf.argmin(tf.reduce_min(weights, axis=range(1, weights.shape.rank)))
        return smallest, row + tf.cast(rows.first_row if rows else 0, tf.int64)

    return require(
        tf.logical_not(smallest < 0),  # NaN is left to the check for finite values
        weights,
        "sample_weight is {} for example {} of the global batch, counted from 0, but weights must not "
        "be negative, since ctl divides by their sum: multiply the loss by it in per_example_loss.",
        numbers,
    )


def global_weight(
    weights: tf.Tensor | None, rows: int | tf.Tensor, global_batch_size: int, dtype: tf.DType
) -> tf.Tensor:
    """Returns the total weight of the global batch, the denominator of every replica's loss.

    Call it in a replica context, with all rows of the replica, never with those of a micro-batch.

    Args:
        weights: from `row_weights`, or None.
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
    per_example: tf.Tensor,
    weights: tf.Tensor | None,
    denominator: tf.Tensor,
    *,
    rows: int | tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns what a micro-batch contributes to the loss of the global batch.

    Args:
        per_example: [rows] losses, not reduced; or [rows, ...] losses, such as those of tokens, if the
            weights have the same shape.
        weights: from `row_weights`, or None.
        denominator: scalar from `global_weight`. If it is zero (all weights are zero), the
            contribution and its gradient are zero.
        rows: the number of rows.

    Returns:
        A scalar; the sum over all replicas and micro-batches is the loss of the global batch.

    Raises:
        UsageError: the shapes do not fit each other.
    """
    _check_shapes(per_example, weights, rows if isinstance(rows, int) else None)
    if rows is not None and per_example.shape[0] is None:  # such as by tf.boolean_mask
        count = tf.shape(per_example)[0]
        per_example = require(
            tf.equal(count, rows), per_example, OTHER_COUNT, lambda: (count, rows)
        )
    if weights is not None:
        # Dimensions that are known only when the step runs must not broadcast either.
        if not (per_example.shape.is_fully_defined() and weights.shape.is_fully_defined()):
            weights = tf.reshape(weights, tf.shape(per_example))
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
    # Every part adds its share, so that the sum over all parts has the regularization once.
    return tf.add_n([tf.cast(loss, dtype) for loss in losses]) / tf.cast(parts, dtype)


def check_regularization(
    losses: Sequence[tf.Tensor], rows: Iterable[tf.Tensor | None], *, equal: bool
) -> list[tf.Tensor]:
    """Raises UsageError if a regularization loss depends on the rows of a micro-batch.

    It would be added once per part of the batch, so its weight would depend on the split. A tf_keras
    activity regularizer is a mean over the rows of a part, which is accepted if all parts are equal.

    Args:
        losses: the losses, in the graph that is being traced.
        rows: the tensors of the micro-batch.
        equal: whether all parts have the same number of rows, without padding.

    Returns:
        The losses that depend on the rows.
    """
    rows = [tensor for tensor in rows if tensor is not None]
    dependent = [loss for loss in losses if dataflow.depends_on(loss, rows)]
    # ctl's own numbers of rows contain that of the replica.
    of_rows = {id(loss) for loss in dependent}
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    for loss in losses:
        if id(loss) in of_rows:
            continue
        names = [x.op.name for x in dataflow.ancestors(loss) if x.op.type == "Const"]
        if replicas > 1 and any("replica_id_in_sync_group" in name for name in names):
            raise UsageError(
                f'The loss "{loss.op.name}" of add_loss or regularization_losses uses the number of the '
                "replica, but must be the same on all replicas: leave the number out."
            )
    for loss in dependent:
        if not (equal and _ACTIVITY.search(loss.op.name)):
            raise UsageError(
                f'The loss "{loss.op.name}" of add_loss or regularization_losses depends on the rows of '
                "the batch: return its values from forward, one per row, and add them in "
                "per_example_loss."
            )
    return dependent


def _check_shapes(per_example: tf.Tensor, weights: tf.Tensor | None, rows: int | None) -> None:
    shape = per_example.shape
    # A wrong number of losses could broadcast against the weights without an error.
    if not shape[:1].is_compatible_with([rows]):
        raise UsageError(
            f"per_example_loss returned {shape[0]} losses for {rows} examples: return one loss per "
            "example, reduced over all other axes."
        )
    # Whether each row or each token counts the same is not ctl's decision.
    if shape.rank > 1 and (weights is None or weights.shape.rank == 1):
        raise UsageError(
            f"per_example_loss returned shape {shape}: return weights of this shape from sample_weight "
            "(such as 1 per token and 0 for padding), or reduce the losses to one loss per example "
            "(tf.reduce_mean over all axes but the first)."
        )
    # [rows, 1] would broadcast against [rows] to [rows, rows].
    if weights is not None and not shape.is_compatible_with(weights.shape):
        raise UsageError(
            f"sample_weight has shape {weights.shape}, but per_example_loss returned {shape}: return "
            "one weight for each loss, in the same shape."
        )


class LossMeans:
    """The mean of each loss with a name over the applied steps; create it in the strategy's scope.

    Args:
        names: the names of the losses; none if there is one loss, which has no name.
        dtype: the dtype of the means.
    """

    def __init__(self, names: Iterable[str], dtype: tf.DType):
        self._dtype = dtype
        self._is_updated = False
        self._means = {name: tf_keras.metrics.Mean(f"{name}_loss", dtype=dtype) for name in names}

    def update(
        self,
        shares: Sequence[Mapping[str, tf.Tensor]],
        applied: Mapping[str, tf.Tensor | bool],
    ) -> None:
        """Adds a step; call it in a replica context.

        Args:
            shares: for each micro-batch of this replica, name -> its share of the global loss.
            applied: name -> scalar, whether the update by this loss was applied.
        """
        self._is_updated = True
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        for name, mean in self._means.items():
            # The sum over the replicas is the loss, but the metric also counts each replica.
            value = tf.add_n([each[name] for each in shares]) * replicas
            # A skipped loss can be NaN, and 0 x NaN is NaN.
            value = tf.where(tf.cast(applied[name], tf.bool), value, tf.zeros_like(value))
            mean.update_state(value, sample_weight=tf.cast(applied[name], self._dtype))

    def reset(self) -> None:
        """Resets the means."""
        for mean in self._means.values():
            mean.reset_state()

    def result(self) -> dict[str, tf.Tensor]:
        """Returns the means, named as tf_keras does: the loss "age" is "age_loss".

        Raises:
            UsageError: the losses have names, but no step called `update`.
        """
        if self._means and not self._is_updated:
            raise UsageError(
                "loss_weights has no effect, because the step never calls self.minimize: remove it."
            )
        return {f"{name}_loss": mean.result() for name, mean in self._means.items()}
