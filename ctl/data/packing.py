"""Packs sequences into rows of one length, with almost no padding.

Which sequences share a row is computed once, from their lengths and a seed alone. The rows are then
the examples of a `Source`, so that the sampler permutes them in each epoch, and a run resumes at any
step without a state.
"""

import logging
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl.data import ragged, sampler
from ctl.data.source import Batch, Source
from ctl.errors import UsageError

_LOG = logging.getLogger("ctl")
_WINDOWS_PER_CALL = 1024  # packed in the same numpy calls; bounds the memory


class Packing(NamedTuple):
    """The pieces of sequences that form each row.

    Attributes:
        row_splits: [rows + 1] int64; row i holds the pieces [row_splits[i], row_splits[i + 1]).
        examples: [pieces] int64, the sequence of a piece.
        starts: [pieces] int64, where in its sequence a piece begins.
        sizes: [pieces] int64, the length of a piece, at least 1.
    """

    row_splits: np.ndarray
    examples: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


def packed(
    source: Source, length: int,
    *, split_long: bool = False, window: int = 1024, seed: int = 0, lengths: str | None = None,
) -> "Packed":  # fmt: skip
    """Packs sequences into rows of `length` tokens.

        corpus = ctl.data.records("corpus/*.tfrecord", parse)   # {"x": [tokens], "label": [tokens]}
        ctl.data.packed(corpus, 512, split_long=True)

    An example of the result is a row: the source's features, padded with zeros at the end, and

    - `segment_ids`, [length] int32: the number of the token's sequence in the row, from 1; 0 for
      padding. Attention must not cross segments.
    - `positions`, [length] int32: the position of a token in its segment, from 0.
    - `weight`, [length] float32: 1 for a token and 0 for padding, or the source's weights.

    The sequences are shuffled by `seed` and divided into windows, each of which is packed by first-fit
    in the order of decreasing length (Johnson et al. 1974). So which sequences share a row depends on
    `seed` and the lengths, and is the same in each epoch; the order of the rows differs.

    Args:
        source: examples whose features have the shape [tokens, ...], with one number of tokens in an
            example. Only `weight` may also be a scalar, which is the weight of each token.
        length: the tokens of a row.
        split_long: cut sequences of more than `length` tokens into pieces, each a segment of its own.
            Otherwise they are rejected.
        window: the number of sequences that are packed together.
        seed: determines the windows.
        lengths: a file that keeps the lengths of the sequences, "lengths.npy". Without it the source
            is read once at the start of each run, unless it is in memory.

    Raises:
        UsageError: the source has no sequences, or a sequence is too long.
    """
    for name, value, least in (("length", length, 1), ("window", window, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(
                f"ctl.data.packed got {name}={value!r}, but requires an integer of at least {least}."
            )
    spec = ragged.batch_spec(source, "ctl.data.packed")
    scalars = [n for n, s in spec.items() if not ragged.is_ragged(s) and n != "weight"]
    if scalars:
        raise UsageError(
            f"ctl.data.packed got the feature {scalars[0]!r} with one value per example, but the rows "
            "hold several examples: remove it, repeat it for each token, or use ctl.data.bucketed."
        )
    sizes = ragged.read_lengths(source, lengths)
    too_long = int((sizes > length).sum())
    if too_long and not split_long:
        raise UsageError(
            f"{too_long:,} of {len(sizes):,} sequences have more than length={length} tokens, at most "
            f"{sizes.max():,}: choose a longer length, or split_long=True to cut them."
        )
    packing = pack(sizes, length=length, window=window, seed=seed)
    result = Packed(source, spec, sizes, packing, length)
    text = "ctl.data.packed: %d sequences in %d rows of %d tokens, %.2f%% padding."
    _LOG.info(text, len(sizes), len(result), length, 100 * result.padding)
    return result


def pack(lengths: np.ndarray, *, length: int, window: int, seed: int) -> Packing:
    """Packs sequences into rows.

    Args:
        lengths: [sequences] int64. Sequences without tokens are skipped.
        length: the tokens of a row.
        window: the number of pieces that are packed together.
        seed: determines the windows.

    Returns:
        The rows; each sequence is cut into pieces of at most `length` tokens.
    """
    counts = -(-lengths // length)
    examples = np.repeat(np.arange(len(lengths)), counts)
    starts = length * (np.arange(len(examples)) - np.repeat(np.cumsum(counts) - counts, counts))
    sizes = np.minimum(lengths[examples] - starts, length)
    # The raw numbers of a bit generator are the same in all versions of numpy, shuffles are not.
    generator = np.random.Philox(key=sampler.derive_seed(seed, "packing"))
    order = np.argsort(generator.random_raw(len(sizes)), kind="stable")
    is_full = sizes[order] == length  # rows by themselves, which need no place in a window
    full, rest = order[is_full], order[~is_full]
    bins = _first_fit_bins(sizes[rest], length=length, window=window)
    rows = np.concatenate([np.arange(len(full)), len(full) + bins])
    pieces = np.concatenate([full, rest])[np.argsort(rows, kind="stable")]
    row_splits = np.concatenate([[0], np.cumsum(np.unique(rows, return_counts=True)[1])])
    return Packing(row_splits, examples[pieces], starts[pieces], sizes[pieces])


def _first_fit_bins(sizes: np.ndarray, *, length: int, window: int) -> np.ndarray:
    """Returns the bin of each size, [sizes]; bins of different windows are different."""
    bins = np.zeros(len(sizes), np.int64)
    per_call = window * _WINDOWS_PER_CALL
    for first in range(0, len(sizes), per_call):
        part = sizes[first : first + per_call]
        # All windows are packed at the same time: one numpy call per place in a window.
        padded = np.zeros([-(-len(part) // window), window], np.int32)
        padded.flat[: len(part)] = part
        decreasing = np.argsort(-padded, axis=1, kind="stable")
        free = np.full(padded.shape, length, np.int32)
        chosen = np.zeros(padded.shape, np.int64)
        windows = np.arange(len(padded))
        for place in range(window):
            item = decreasing[:, place]
            size = padded[windows, item]
            # A new bin is always large enough, so there is a first one that is.
            bin_ = np.argmax(free[:, : place + 1] >= size[:, np.newaxis], axis=1)
            free[windows, bin_] -= size
            chosen[windows, item] = bin_
        chosen += window * (first // window + windows)[:, np.newaxis]
        bins[first : first + per_call] = chosen.flat[: len(part)]
    return bins


class Packed(ragged.Grouped):
    """Rows of packed sequences.

    Args:
        source: the sequences.
        spec: the specs of a batch of them.
        lengths: [sequences] int64.
        packing: the rows.
        length: the tokens of a row.

    Attributes:
        padding: the share of the tokens of all rows that are padding.
    """

    def __init__(
        self, source: Source, spec: dict[str, Any], lengths: np.ndarray, packing: Packing,
        length: int,
    ):  # fmt: skip
        self._source, self.inner_sources = source, (source,)
        self._length = length
        self._has_token_weights = ragged.is_ragged(spec.get("weight"))
        self._count = len(packing.row_splits) - 1
        self.padding = 1 - float(packing.sizes.sum()) / (self._count * length)
        if source.row_bytes is not None or source.lengths is not None:
            features = sum(value.dtype.size for value in spec.values())
            self.row_bytes = length * (features + 3 * tf.int32.size)
        row_splits, *pieces = packing
        with tf.init_scope(), tf.device("CPU:0"):
            self._row_splits = tf.constant(row_splits, tf.int64)
            columns = [*pieces, lengths[packing.examples]]
            self._pieces = tf.constant(np.stack(columns, axis=1), tf.int64)

    def __len__(self) -> int:
        """The number of rows."""
        return self._count

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads rows."""
        begins = tf.gather(self._row_splits, indexes)
        pieces = tf.ragged.range(begins, tf.gather(self._row_splits, indexes + 1))
        examples, starts, sizes, lengths = tf.unstack(tf.gather(self._pieces, pieces.values), 4, 1)
        slices = ragged.read_slices(self._source, examples, starts, sizes, lengths)
        if "weight" not in slices:
            slices["weight"] = tf.ones_like(sizes, tf.float32)
        if not self._has_token_weights:
            slices["weight"] = tf.repeat(slices["weight"], sizes, axis=0)
        numbers = pieces.values - tf.repeat(begins, pieces.row_lengths()) + 1
        slices["segment_ids"] = tf.repeat(tf.cast(numbers, tf.int32), sizes)
        slices["positions"] = tf.ragged.range(tf.cast(sizes, tf.int32)).values
        used = tf.reduce_sum(pieces.with_values(sizes), axis=1)
        return {name: self._pad(values, used) for name, values in slices.items()}

    def _pad(self, values: tf.Tensor, used: tf.Tensor) -> tf.Tensor:
        """[tokens of all rows, ...] -> [rows, length, ...], where `used` has the tokens of each row."""
        shape = [None, self._length, *values.shape[1:]]
        rows = tf.RaggedTensor.from_row_lengths(values, used, validate=False)
        return tf.ensure_shape(rows.to_tensor(shape=shape), shape)
