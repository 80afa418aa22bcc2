"""Reads batches of the data like the tensors of a trace, for the checks of a step."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.checks.probe_error import ProbeError
from ctl.rows.trace import Trace, symbolic

ReadBatch = Callable[[], Any]  # a batch of a replica and its mask
_UNKNOWN = 4  # the size of an axis that is not known


def read_values(
    trace: Trace, read: ReadBatch, size: int | None, *, least: int, is_first: bool = True
) -> tuple[list[tf.Tensor], list[bool]]:
    """Returns the values of a batch for the tensors of a trace, and which of them are labels.

    Args:
        trace: the trace.
        read: returns the batch and its mask.
        size: the number of rows; None for those that the batch has, or `least`.
        least: see `size`.
        is_first: whether to make rows up if there is no batch.
    """
    tensors = symbolic(trace.inputs)
    batch = read_existing(read, size or least, trace if is_first else None)
    values = tf.nest.flatten(batch)
    keys = sorted(batch) if isinstance(batch, Mapping) else []
    labels = [key == "label" for key in keys for _ in tf.nest.flatten(batch[key])]
    # The row mask, or weights that the step has added.
    values += [tf.ones(values[0].shape[:1])] * (len(values) + 1 == len(tensors))
    if len(values) != len(tensors):
        raise ProbeError("the batches of the data are others")
    values = [tf.cast(v[:size], x.dtype) for v, x in zip(values, tensors, strict=True)]
    return values, [*labels, *[False] * (len(values) - len(labels))]


def read_existing(read_batch: ReadBatch, least: int, trace: Trace | None = None) -> Any:
    """Returns the rows of the first batch that exist; they repeat if it has less than `least`.

    Args:
        read_batch: returns the batch and its mask.
        least: the number of rows.
        trace: whose inputs are made up if no batch can be read.
    """
    try:
        batch, mask = read_batch()
    # ValueError: distributed data of the user cannot be read while a replica is traced.
    except (tf.errors.OpError, StopIteration, ValueError) as error:
        if trace is None:
            raise ProbeError("there is no batch to compute it for") from error
        inputs = trace.inputs[0] if isinstance(trace.inputs, tuple) else trace.inputs
        return tf.nest.map_structure(lambda x: tf.constant(_make_rows(x, least)), inputs)
    if mask is not None:
        batch = tf.nest.map_structure(lambda x: tf.boolean_mask(x, mask > 0), batch)
    rows = tf.nest.flatten(batch)[0].shape[0]
    if rows < 2:
        raise ProbeError("the batch has one row")
    return tf.nest.map_structure(lambda x: tf.gather(x, np.arange(max(rows, least)) % rows), batch)


def _make_rows(tensor: tf.Tensor, rows: int) -> np.ndarray:
    """Makes rows like those of a tensor where no batch can be read; other axes may be unknown, too."""
    shape = [rows, *(_UNKNOWN if size is None else size for size in tensor.shape[1:])]
    draw = np.random.default_rng(0)
    if tensor.dtype == tf.string:
        return np.full(shape, b"")
    values = draw.normal(size=shape) if tensor.dtype.is_floating else draw.integers(0, 2, shape)
    return values.astype(tensor.dtype.as_numpy_dtype)
