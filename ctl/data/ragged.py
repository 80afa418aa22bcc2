"""Examples of variable length: a source in memory, and reading them and their lengths from any source.

The features whose length differs between examples are `tf.RaggedTensor`s of shape [rows, length, ...].
`ctl.data.packed` and `ctl.data.bucketed` make dense batches of them.
"""

from collections.abc import Mapping, Sequence
import copy
import io
import logging
import time
from typing import Any

import numpy as np
import tensorflow as tf

from ctl import errors
from ctl.data.autograph import convert, traced
from ctl.data.data_errors import CHANGED_LENGTHS, report_data_errors
from ctl.data.distribution import disable_autotune
from ctl.data.elements import name_features
from ctl.data.features import copy_to_array
from ctl.data.files.record_index import write_file
from ctl.data.source import Augmented, RowSource, Source
from ctl.errors import UsageError

_LOG = logging.getLogger("ctl")
_ROWS_PER_READ = 256  # when the lengths are read
_SLOW = 10.0  # seconds


def sequences(features: Mapping[str, Any]) -> "Sequences":
    """Returns a source of examples of variable length, held in memory.

        ctl.data.sequences({"tokens": [[5, 2], [7, 1, 4]], "weight": [1.0, 0.5]})

    Pass it to `ctl.data.packed` or `ctl.data.bucketed`, whose batches are dense.

    Args:
        features: name -> a list of one array of shape [length, ...] per example, or a
            `tf.RaggedTensor`; or an array of shape [examples] with one value per example.

    Raises:
        UsageError: no feature is a list of sequences, the features have different numbers of
            examples, or an example has sequences of different lengths.
    """
    if not isinstance(features, Mapping) or not features:
        raise UsageError("ctl.data.sequences requires a dict of lists, {name: [sequence, ...]}.")
    return Sequences({name: _as_tensor(name, value) for name, value in features.items()})


class Sequences(Source):
    """Examples of variable length in memory.

    Attributes:
        features: name -> ragged tensor, or [examples] tensor.

    Raises:
        UsageError: as for `sequences`.
    """

    def __init__(self, features: Mapping[str, Any]):
        self.features = dict(features)
        counts = {name: int(tensor.shape[0]) for name, tensor in features.items()}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            raise UsageError(
                f"The sequences have {counts} examples, but each feature must have the same number, "
                "at least 1."
            )
        lengths = [(n, t.row_lengths().numpy()) for n, t in features.items() if is_ragged(t)]
        if not lengths:
            raise UsageError(
                "ctl.data.sequences got no list of sequences: use ctl.data.arrays for examples of "
                "equal shapes."
            )
        names, columns = zip(*lengths, strict=True)
        self._count = min(counts.values())
        self.lengths = one_length(names, np.stack(columns, axis=1), first=0)

    def __len__(self) -> int:
        """The number of examples."""
        return self._count

    def gather(self, indexes: tf.Tensor) -> dict[str, Any]:
        """Reads examples; features of variable length are ragged."""
        return {name: tf.gather(tensor, indexes) for name, tensor in self.features.items()}


class Grouped(Source):
    """The sequences of another source, `_source`, in dense rows."""

    _source: Source

    def without_python(self) -> Source:
        """Returns the same rows, read by TensorFlow ops alone."""
        source = copy.copy(self)
        source._source = self._source.without_python()
        return source


def is_ragged(value: Any) -> bool:
    """Returns whether a feature, or its spec, has a length that differs between examples."""
    return isinstance(value, tf.RaggedTensor | tf.RaggedTensorSpec)


def read_batch(source: Source, indexes: tf.Tensor) -> dict[str, Any]:
    """Reads examples; features of variable length are ragged tensors of ragged rank 1."""
    if isinstance(source, RowSource):
        rows = tf.data.Dataset.from_tensors((source.read(indexes),)).unbatch()
        examples = rows.map(lambda row: name_features(convert(source.parse)(row)))
        batch = examples.ragged_batch(tf.size(indexes, tf.int64)).get_single_element()
    else:
        batch = source.gather(indexes)
    nested = [name for name, value in batch.items() if isinstance(value, dict)]
    if nested:
        raise UsageError(
            f"The feature {nested[0]!r} of the sequences is a dict: give each of its entries a name of "
            "its own, and gather them in preprocess."
        )
    return {name: _with_one_ragged_axis(name, value) for name, value in batch.items()}


def read_slices(
    source: Source, indexes: tf.Tensor, starts: tf.Tensor, sizes: tf.Tensor, lengths: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Reads a slice of each of several sequences.

    Args:
        source: the sequences.
        indexes: [slices] int64 examples.
        starts: [slices] int64, where in its example a slice begins.
        sizes: [slices] int64 lengths of the slices.
        lengths: [slices] int64 lengths of the examples, which are verified.

    Returns:
        Features of sequences as [sum of sizes, ...] tensors, the others as [slices, ...].
    """
    if isinstance(source, Sequences):  # are in memory, so that only the slices are copied
        batch, rows = source.features, indexes
    else:
        batch = verify_lengths(read_batch(source, indexes), lengths)
        rows = tf.range(tf.size(indexes))
    sliced = {}
    for name, value in batch.items():
        places = rows
        if is_ragged(value):
            begins = tf.gather(value.row_splits, rows) + starts
            places, value = tf.ragged.range(begins, begins + sizes).values, value.values
        sliced[name] = tf.gather(value, places)
    return sliced


def verify_lengths(batch: dict[str, Any], lengths: tf.Tensor) -> dict[str, Any]:
    """Makes a batch fail with a message if its sequences have other lengths than were read before.

    The tokens would otherwise be cut or read from a neighboring example without an error.
    """
    verified = {}
    for name, value in batch.items():
        if is_ragged(value):
            check = tf.debugging.assert_equal(value.row_lengths(), lengths, CHANGED_LENGTHS)
            with tf.control_dependencies([check] if check is not None else []):
                value = value.with_values(tf.identity(value.values))
        verified[name] = value
    return verified


def batch_spec(source: Any, function: str) -> dict[str, Any]:
    """Returns the specs of a batch of sequences, without reading an example.

    Args:
        source: what the user passed.
        function: the function that the user called, for messages.

    Raises:
        UsageError: it is not a source, has an order of its own, or its examples have equal shapes.
    """
    if isinstance(source, Augmented):
        raise UsageError(
            f"{function} got augmented examples, whose lengths may change: augment its result."
        )
    if not isinstance(source, Source):
        raise UsageError(
            f"{function} got {errors.type_name(source)}, but requires a ctl.data.Source, such as "
            "ctl.data.records(...) or ctl.data.sequences(...)."
        )
    if source.has_own_order:
        raise UsageError(
            f"{function} cannot group the examples of a ctl.data.mixture or ctl.data.bucketed: apply "
            f"{function} to each source, and mix the results."
        )
    read = traced(lambda indexes: read_batch(source, indexes))
    outputs = read.get_concrete_function(tf.TensorSpec([None], tf.int64)).structured_outputs
    spec = {name: tf.type_spec_from_value(value) for name, value in outputs.items()}
    for name, value in spec.items():
        if not is_ragged(value) and None in value.shape[1:].as_list():
            raise UsageError(
                f"{function} cannot know the lengths of the feature {name!r}, which the source pads: "
                "return a tf.RaggedTensor from gather, or use ctl.data.RowSource."
            )
    if not any(is_ragged(value) for value in spec.values()):
        raise UsageError(
            f"{function} requires a feature whose length differs between examples, but all have equal "
            f"shapes: {', '.join(f'{name} {tuple(s.shape[1:])}' for name, s in spec.items())}."
        )
    added = [name for name in ("segment_ids", "positions") if name in spec]
    if added:
        raise UsageError(f"{function} adds the feature {added[0]!r}: rename that of the source.")
    return spec


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
        saved = _load_lengths(path, len(source)) if path else None
        lengths = _scan_lengths(source, path) if saved is None else saved
    if lengths.shape != (len(source),):
        raise UsageError(
            f"The source has lengths of shape {lengths.shape}, but must have one per example, "
            f"[{len(source)}]."
        )
    if not lengths.any():
        raise UsageError("All sequences are empty, but at least one must have a token.")
    return lengths


def _scan_lengths(source: Source, path: str | None) -> np.ndarray:
    started = time.monotonic()
    names: list[str] = []
    columns: list[np.ndarray] = []

    def lengths_of(indexes: tf.Tensor) -> tf.Tensor:
        batch = read_batch(source, indexes)
        names[:] = [name for name, value in batch.items() if is_ragged(value)]
        return tf.stack([batch[name].row_lengths() for name in names], axis=1)

    with tf.init_scope():
        indexes = tf.data.Dataset.range(len(source)).batch(_ROWS_PER_READ)
        rows = indexes.map(lengths_of, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        with report_data_errors("training", lambda: rows.element_spec):
            for values in disable_autotune(rows):
                first = len(columns) * _ROWS_PER_READ
                columns.append(one_length(names, values.numpy(), first=first))
    lengths = np.concatenate(columns)
    if path:
        _save_lengths(path, lengths)
    seconds = time.monotonic() - started
    if seconds > _SLOW and not path:
        text = "Reading the lengths of %d sequences took %.0f s: pass lengths=FILE to keep them."
        _LOG.warning(text, len(lengths), seconds)
    return lengths


def _load_lengths(path: str, count: int) -> np.ndarray | None:
    if not tf.io.gfile.exists(path):
        return None
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            lengths = np.load(io.BytesIO(file.read()), allow_pickle=False)
    except (ValueError, EOFError, MemoryError):
        raise UsageError(f"{path} is not a file of lengths: remove it.") from None
    if lengths.shape != (count,) or lengths.dtype != np.int64:
        raise UsageError(
            f"{path} has lengths of shape {lengths.shape}, but the data has {count} examples: remove "
            "the file, which is then written again, or name another one for this source."
        )
    return lengths


def _save_lengths(path: str, lengths: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, lengths)
    try:
        write_file(path, content.getvalue())
    except tf.errors.OpError as error:
        raise UsageError(
            f"The lengths cannot be written to {path} ({type(error).__name__}): choose another file."
        ) from None


def one_length(names: Sequence[str], columns: np.ndarray, *, first: int) -> np.ndarray:
    """Returns the lengths of examples.

    Args:
        names: the features of sequences.
        columns: [rows, features] their lengths.
        first: the index of the first example, for the message.

    Returns:
        [rows] int64.

    Raises:
        UsageError: the sequences of an example have different lengths.
    """
    rows, features = np.nonzero(columns != columns[:, :1])
    if len(rows):
        row, feature = rows[0], features[0]
        raise UsageError(
            f"Example {first + row} has {columns[row, 0]} values of {names[0]!r}, but "
            f"{columns[row, feature]} of {names[feature]!r}: the sequences of an example must have "
            "one length."
        )
    return columns[:, 0].astype(np.int64)


def _as_tensor(name: str, value: Any) -> Any:
    """Returns a feature as a ragged tensor of ragged rank 1, or as a tensor of shape [examples]."""
    # init_scope: tensors that are created while a tf.function is traced must outlive the trace.
    with tf.init_scope(), tf.device("CPU:0"):
        if is_ragged(value):
            return _with_one_ragged_axis(name, value)
        try:
            rows = [copy_to_array(row) for row in value]
            if all(row.ndim == 0 for row in rows):
                return tf.identity(tf.convert_to_tensor(value))
            kinds = {row.dtype.kind for row in rows if row.size}
            if len(kinds) > 1 and not kinds <= set("biuf"):
                raise TypeError  # numpy would convert numbers among strings to strings
            values = np.concatenate([row for row in rows if row.size] or rows[:1])
            flat = tf.identity(tf.convert_to_tensor(values))
            return tf.RaggedTensor.from_row_lengths(flat, [len(row) for row in rows])
        except (TypeError, ValueError):
            raise UsageError(
                f"ctl.data.sequences cannot convert {name!r}, {errors.type_name(value)}: provide a "
                "list of arrays of numbers that differ in their first axis only."
            ) from None


def _with_one_ragged_axis(name: str, value: Any) -> Any:
    """Makes the axes after the length dense; each must have one size in all examples."""
    if not is_ragged(value):
        return value
    value = value.with_row_splits_dtype(tf.int64)
    if value.ragged_rank == 1:
        return value
    # Padding would have the longest size of the rows that one replica reads, so it would depend on the
    # number of replicas.
    if None in value.values.shape[1:].as_list():
        raise UsageError(
            f"The feature {name!r} of an example has the shape {value.shape[1:]}, but only the first "
            "axis may differ between examples: set the others, as by tf.ensure_shape(x, [None, 3])."
        )
    inner = value.values.to_tensor()
    return tf.RaggedTensor.from_row_splits(inner, value.row_splits, validate=False)
