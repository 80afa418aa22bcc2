"""The lengths of sequences: read once, and kept in a file if the user names one."""

import io
import logging
import os
import time
import uuid

import numpy as np
import tensorflow as tf

from ctl import errors
from ctl.data.data_errors import report_data_errors
from ctl.data.sequences import ragged
from ctl.data.source import Source
from ctl.errors import UsageError

_LOG = logging.getLogger("ctl")
_ROWS_PER_READ = 256
_SLOW = 10.0  # seconds


def read_lengths(source: Source, path: str | None) -> np.ndarray:
    """Returns the length of every sequence.

    Args:
        source: the sequences; read once, completely, unless it has the attribute `lengths`.
        path: a file that keeps the lengths for the next run; None: they are read in each run.

    Returns:
        [examples] int64.

    Raises:
        UsageError: the sequences of an example have different lengths, or all are empty; or the file
            cannot be read or written.
    """
    if not isinstance(path, str | None):
        raise UsageError(
            f"lengths is {errors.type_name(path)}, but must be the path of a file, in which ctl keeps "
            "the lengths."
        )
    if source.lengths is not None:  # part of the data, whereas a file may be out of date
        lengths = np.asarray(source.lengths, np.int64)
    else:
        saved = _load(path, len(source)) if path else None
        lengths = _scan(source, path) if saved is None else saved
    if lengths.shape != (len(source),):
        raise UsageError(
            f"The source has lengths of shape {lengths.shape}, but must have one per example, "
            f"[{len(source)}]."
        )
    if not lengths.any():
        raise UsageError("All sequences are empty, but at least one must have a token.")
    return lengths


def _scan(source: Source, path: str | None) -> np.ndarray:
    started = time.monotonic()
    names: list[str] = []
    columns: list[np.ndarray] = []

    def lengths_of(indexes: tf.Tensor) -> tf.Tensor:
        batch = ragged.read_batch(source, indexes)
        names[:] = [name for name, value in batch.items() if ragged.is_ragged(value)]
        return tf.stack([batch[name].row_lengths() for name in names], axis=1)

    options = tf.data.Options()
    options.autotune.enabled = False  # see ctl.data.distribution
    with tf.init_scope():
        indexes = tf.data.Dataset.range(len(source)).batch(_ROWS_PER_READ)
        rows = indexes.map(lengths_of, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        with report_data_errors("training", lambda: rows.element_spec):
            for values in rows.with_options(options):
                columns.append(
                    ragged.one_length(names, values.numpy(), first=len(columns) * _ROWS_PER_READ)
                )
    lengths = np.concatenate(columns)
    if path:
        _save(path, lengths)
    elif time.monotonic() - started > _SLOW:
        _LOG.warning(
            "Reading the lengths of %d sequences took %.0f s: pass lengths=FILE to keep them.",
            len(lengths),
            time.monotonic() - started,
        )
    return lengths


def _load(path: str, count: int) -> np.ndarray | None:
    if not tf.io.gfile.exists(path):
        return None
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            lengths = np.load(io.BytesIO(file.read()), allow_pickle=False)
    except (ValueError, EOFError):
        raise UsageError(f"{path} is not a file of lengths: remove it.") from None
    if lengths.shape != (count,) or lengths.dtype != np.int64:
        raise UsageError(
            f"{path} has lengths of shape {lengths.shape}, but the data has {count} examples: remove "
            "the file, which is then written again, or name another one for this source."
        )
    return lengths


def _save(path: str, lengths: np.ndarray) -> None:
    """Writes the file atomically, since several processes may write it at the same time."""
    temporary = f"{path}.{uuid.uuid4().hex}"
    content = io.BytesIO()
    np.save(content, lengths)
    try:
        tf.io.gfile.makedirs(os.path.dirname(path) or ".")
        with tf.io.gfile.GFile(temporary, "wb") as file:
            file.write(content.getvalue())
        tf.io.gfile.rename(temporary, path, overwrite=True)
    except tf.errors.OpError as error:
        raise UsageError(
            f"The lengths cannot be written to {path} ({type(error).__name__}): choose another file."
        ) from None
