"""What a loss is divided by, if that is not the sum of the sample weights."""

from collections.abc import Mapping

import tensorflow as tf

from ctl.errors import UsageError
from ctl.update import loss


def numbers_by_name(
    denominator: loss.Denominator,
    weights: Mapping[str, tf.Tensor | None],
    row_mask: tf.Tensor | None,
    rows: int | tf.Tensor,
    dtype: tf.DType,
    *,
    training: bool,
) -> dict[str, tf.Tensor | float | None]:
    """Returns the numbers whose sum over the global batch divides each loss.

    Args:
        denominator: "weights", "batch", "none", or a number for each row; or a dict of name -> one.
        weights: name of a loss -> its weights.
        row_mask: [rows] mask of the rows that exist; None if all exist.
        rows: the number of rows.
        dtype: the dtype of the result.
        training: whether the loss is minimized. An evaluation reports a sum per example.

    Returns:
        name -> [rows, ...] numbers, 0 in rows of padding; None for 1 per row; 1.0 for no division.

    Raises:
        UsageError: there is no such denominator, or not one number for each row.
    """
    given = denominator if isinstance(denominator, Mapping) else dict.fromkeys(weights, denominator)
    if given.keys() != weights.keys():
        raise UsageError(
            f"denominator names {', '.join(given)}, but the losses are "
            f"{', '.join(filter(None, weights)) or 'one without a name'}: name the same ones."
        )
    # Made once for losses with the same one, so that it is summed once.
    made = {id(v): _numbers(v, row_mask, rows, dtype, training=training) for v in given.values()}
    is_weight = {k: isinstance(v, str) and v == "weights" for k, v in given.items()}
    return {k: weights[k] if is_weight[k] else made[id(v)] for k, v in given.items()}


def _numbers(
    given: str | tf.Tensor, row_mask: tf.Tensor | None, rows: int | tf.Tensor, dtype: tf.DType,
    *, training: bool,
) -> tf.Tensor | float | None:  # fmt: skip
    if isinstance(given, str):
        if given == "none" and training:
            return 1.0
        if given not in ("weights", "batch", "none"):
            raise UsageError(
                f'denominator is {given!r}, but must be "weights", "batch", "none" or a tensor.'
            )
        return loss.masked(None, row_mask, dtype)
    numbers = tf.cast(given, dtype)
    count = rows if isinstance(rows, int) else None
    if not numbers.shape.rank or not numbers.shape[:1].is_compatible_with([count]):
        raise UsageError(
            f"denominator has shape {numbers.shape}, but must be [rows] or [rows, ...], such as "
            "tf.reduce_sum(positives, axis=1): ctl sums it over the rows that exist, of all replicas."
        )
    return loss.masked(numbers, row_mask, dtype)
