"""Makes a replica or a micro-batch without rows compute padding, and contribute nothing.

TensorFlow's kernels are not reliable without rows (seen in 2.20 on CPUs): the gradient of a depthwise
convolution's kernel is memory that nothing has written, and in float32 the gradient of a convolution's
kernel is missing, which ends the step with an error.
"""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any

import tensorflow as tf

from ctl.data.source import Batch, Nest
from ctl.keras import models
from ctl.update import gradients
from ctl.update.snapshot import Snapshot


def pad_rows(
    batch: Batch,
    row_mask: tf.Tensor | None,
    rows: int | tf.Tensor,
    *,
    least: int,
    other: Any = None,
) -> tuple[Batch, tf.Tensor | None]:
    """Pads a replica's batch to a least number of rows, one for each micro-batch.

    Args:
        batch: [rows, ...] tensors.
        row_mask: [rows] mask of the rows that exist; None if all exist.
        rows: the number of rows.
        least: the least number of rows.
        other: the batch of another replica, whose first row is the padding of a batch without rows.

    Returns:
        The batch and its row mask. They are unchanged if the number of rows is static, since every
        micro-batch then has a row, and if the batch has values that are no plain tensors.
    """
    tensors = tf.nest.flatten(batch)
    if isinstance(rows, int) or not all(isinstance(value, tf.Tensor) for value in tensors):
        return batch, row_mask
    positions = tf.range(tf.maximum(rows, least))

    def pad(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        # A row of the batch, as in all padding, which the user's code accepts; zeros if there is none.
        zeros = tf.zeros([1, *value.shape[1:]] if value.shape[1:].is_fully_defined() else
                         tf.concat([[1], tf.shape(value)[1:]], 0), value.dtype)  # fmt: skip
        return tf.gather(
            tf.concat([value, other[:1], zeros], 0), tf.minimum(positions, tf.maximum(rows - 1, 0))
        )

    exists = positions < rows
    padded = tf.nest.map_structure(pad, batch, batch if other is None else other)
    if row_mask is None:
        return padded, tf.cast(exists, tf.float32)
    return padded, tf.where(exists, pad(row_mask, row_mask), tf.zeros([], row_mask.dtype))


def zero_without_rows(
    values: Sequence[tf.Tensor], row_mask: tf.Tensor | None, rows: int | tf.Tensor
) -> list[tf.Tensor]:
    """Replaces the gradients, losses or outputs of a micro-batch without rows by zeros.

    The loss of a row of zeros may not be finite, and a product with its mask would be NaN.

    Args:
        values: gradients, losses or outputs.
        row_mask: [rows] mask of the rows that exist; None if all exist.
        rows: the number of rows, including padding.
    """
    if isinstance(rows, int) or row_mask is None:
        return list(values)
    exists = tf.reduce_any(row_mask > 0)

    def zero(value: Any) -> tf.Tensor:
        return tf.where(exists, value, tf.zeros_like(value))

    return [
        gradients.map_values(value, zero)
        if isinstance(value, tf.Tensor | tf.IndexedSlices) and value.dtype.real_dtype.is_floating
        else value
        for value in values
    ]


def zero_outputs(outputs: Nest, row_mask: tf.Tensor | None, rows: int | tf.Tensor) -> Nest:
    """Replaces the outputs of a model without rows by zeros; the masks of tf_keras stay attached."""
    if isinstance(rows, int) or row_mask is None:
        return outputs
    keras_masks = models.masks_of(outputs)
    zeros = zero_without_rows(tf.nest.flatten(outputs), row_mask, rows)
    result = tf.nest.pack_sequence_as(outputs, zeros)
    models.attach_masks(result, keras_masks)
    return result


@contextlib.contextmanager
def keep_statistics(
    statistics: Sequence[tf.Variable], row_mask: tf.Tensor | None
) -> Iterator[None]:
    """Leaves moving statistics as they are if the micro-batch computed in the block has no rows.

    They would move towards the statistics of padding: towards 0, or to the variance of a single row.

    Args:
        statistics: moving statistics that each replica computes from its own rows.
        row_mask: [rows] mask of the rows that exist; None if all exist.
    """
    snapshot = Snapshot(statistics if row_mask is not None else [])
    yield
    if row_mask is not None:
        snapshot.restore_unless(tf.reduce_any(row_mask > 0))
