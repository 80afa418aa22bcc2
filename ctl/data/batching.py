"""Reads the rows of a source for the replicas, as the elements that `kinds` describes."""

from collections.abc import Callable
import math
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.autograph import convert
from ctl.data.layout import Layout, WorkerShard
from ctl.data.source import Augment, MaskedBatch, RowSource, Source

# Limits of one call of the sampler and of a source in memory. A call costs 0.1 ms however many
# examples it reads, and its result should stay in the processor's cache until it is used.
MAX_BATCHES_PER_CALL = 16
MAX_BYTES_PER_CALL = 2 * 2**20
# Rows of at least this many bytes are parsed and augmented one per call, so that few of them are in
# memory. A call costs some 20 microseconds, so the calls for smaller rows take a chunk of them.
_LARGE_ROW = 4096
_ROWS_PER_READ = 64  # when all examples are read once
# `Dataset.counter` calls a function for every element, and TensorFlow never frees that function.
_ENDLESS = tf.int64.max
# Calls of `map` run in parallel, one per core, and their results stay in order.
PARALLEL: dict[str, Any] = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}


def all_examples(source: Source) -> tf.data.Dataset:
    """Returns every example once, in order, read and parsed in parallel; they are not batched."""
    rows = min(len(source), _ROWS_PER_READ)
    read, parse = _functions(source)
    indexes = tf.data.Dataset.range(len(source)).batch(rows)
    chunks = indexes.map(lambda i: (read(i),), **PARALLEL)
    if parse is None:
        return chunks.map(lambda batch: batch).unbatch()
    return _map_rows(chunks, parse, source=source, rows=rows)


def batches_per_call(source: Source, layout: Layout) -> int:
    """Returns how many per-replica batches to read in one call of `source.gather`.

    It reads several if the examples are small and known to be read fast. A user's own source may decode
    images: it is called once per batch, so that the calls run in parallel.
    """
    if source.row_bytes is None:
        return 1
    batch_bytes = max(1, int(source.row_bytes * layout.rows_per_replica))
    return max(1, min(MAX_BATCHES_PER_CALL, MAX_BYTES_PER_CALL // batch_bytes))


# The rows of several consecutive per-replica batches: the examples, [batches x rows, ...] tensors;
# their seeds for random augmentation, [batches x rows, 2] int64; and the mask of the rows that exist,
# [batches, rows] float32, or None if all rows exist.
_Chunk = tuple[Any, tf.Tensor, tf.Tensor | None]
_ReadChunk = Callable[[tf.Tensor], _Chunk]


def _functions(source: Source) -> tuple[Callable[[tf.Tensor], Any], Callable[..., Any] | None]:
    """Returns what reads the rows of indexes, and what parses one; None if they are examples."""
    if isinstance(source, RowSource):
        return source.read, source.parse
    return source.gather, None


def training_reader(
    source: Source, layout: Layout, *, seed: int, start: int, size: int, shard: WorkerShard | None
) -> _ReadChunk:
    """Returns a function that reads the batches [index x size, (index + 1) x size) of the stream."""
    batch_size, local = layout.global_batch_size, layout.local_replicas
    first, stride = (start, 1) if shard is None else (start + shard.index, shard.num_workers)
    # A chunk touches at most this many steps; all its positions are less than `span` apart.
    span = ((size + local - 2) // local * stride + 1) * batch_size
    read, _ = _functions(source)

    def read_chunk(index: tf.Tensor) -> _Chunk:
        positions, mask = _positions(layout, index, size=size, first=first, stride=stride)
        indexes, seeds = source.training_order(
            positions, batch_size=batch_size, seed=seed, span=span
        )
        return read(indexes), seeds, mask

    return read_chunk


def evaluation_reader(source: Source, layout: Layout) -> _ReadChunk:
    """Returns a function that reads a batch of an evaluation, without seeds."""
    read, _ = _functions(source)
    batches = math.ceil(len(source) / layout.global_batch_size) * layout.local_replicas

    def read_chunk(index: tf.Tensor) -> _Chunk:
        positions, mask = _positions(layout, index % batches, examples=len(source))
        indexes = source.evaluation_order(positions, batch_size=layout.global_batch_size)
        return read(indexes), tf.zeros([layout.rows_per_replica, 2], tf.int64), mask

    return read_chunk


def _positions(
    layout: Layout, index: tf.Tensor,
    *, size: int = 1, first: int | tf.Tensor = 0, stride: int = 1, examples: int | None = None,
) -> tuple[tf.Tensor, tf.Tensor | None]:  # fmt: skip
    """Returns the rows of a chunk by their positions in the stream, and the mask of those that exist.

    The mask is None if all rows exist in every chunk.

    Args:
        layout: which rows this pipeline feeds to which replicas.
        index: the number of the chunk.
        size: the number of batches in a chunk.
        first: the first step.
        stride: the number of steps from one global batch of this pipeline to its next.
        examples: the length of the stream; None if it is endless.
    """
    # NumPy computes what is the same for all chunks: each operation makes the first batch later.
    batch_size, rows = layout.global_batch_size, layout.rows_per_replica
    step = index * size + np.arange(size)[:, np.newaxis]
    replica = np.full([size, 1], layout.first_replica)
    if layout.local_replicas > 1:
        replica = replica + step % layout.local_replicas
        step //= layout.local_replicas
    start = step * (stride * batch_size) + first * batch_size
    offsets = replica * rows + np.arange(rows)
    last = batch_size - 1 if examples is None else tf.minimum(examples - 1 - start, batch_size - 1)
    # Padding repeats the last row of the same global batch.
    existing = tf.reshape(start + tf.minimum(offsets, last), [-1])
    all_exist = layout.even and (examples is None or examples % batch_size == 0)
    return existing, None if all_exist else tf.cast(offsets <= last, tf.float32)


def source_batches(
    read_chunk: _ReadChunk, source: Source, augment: Augment | None, layout: Layout, *, size: int
) -> tf.data.Dataset:
    """Returns the batches of chunks, each example of which is parsed and augmented if necessary."""
    if augment is not None or isinstance(source, RowSource):
        return _map_examples(read_chunk, source, augment, layout, size=size)
    if size == 1:
        return array_batches(read_chunk, [layout.rows_per_replica])
    return array_batches(read_chunk, [size, layout.rows_per_replica]).unbatch()


def array_batches(read_chunk: _ReadChunk, leading: list[int]) -> tf.data.Dataset:
    """Returns chunks whose values have these leading dimensions instead of the first one."""

    def reshape(values: tf.Tensor) -> tf.Tensor:
        rest = values.shape[1:]
        if len(leading) > 1:
            shape = rest if rest.is_fully_defined() else tf.shape(values)[1:]
            values = tf.reshape(values, tf.concat([leading, shape], axis=0))
        return tf.ensure_shape(values, [*leading, *rest])

    def read(index: tf.Tensor) -> MaskedBatch:
        examples, _, row_mask = read_chunk(index)
        mask = None if row_mask is None else tf.reshape(row_mask, leading)
        return MaskedBatch(tf.nest.map_structure(reshape, examples), mask)

    # One call per core, unless calls are so large that two saturate the memory bandwidth.
    is_large = len(leading) > 1 and leading[0] > MAX_BATCHES_PER_CALL
    calls = 2 if is_large else tf.data.AUTOTUNE
    return tf.data.Dataset.range(_ENDLESS).map(read, num_parallel_calls=calls, deterministic=True)


def _map_examples(
    read_chunk: _ReadChunk, source: Source, augment: Augment | None, layout: Layout, *, size: int
) -> tf.data.Dataset:
    """Returns batches of examples, each of which is parsed and augmented in the same call."""
    _, parse = _functions(source)

    def chunk_rows(index: tf.Tensor) -> tuple[Any, ...]:
        examples, seeds, row_mask = read_chunk(index)
        return examples, seeds, *(() if row_mask is None else (tf.reshape(row_mask, [-1]),))

    def make_example(row: Any, seed: tf.Tensor, *mask: tf.Tensor) -> tuple[Any, ...]:
        example = row if parse is None else convert(parse)(row)
        return example if augment is None else convert(augment)(example, seed), *mask

    chunks = tf.data.Dataset.range(_ENDLESS).map(chunk_rows, **PARALLEL)
    rows = layout.rows_per_replica
    examples = _map_rows(chunks, make_example, source=source, rows=size * rows)
    # The calls of the map write into the batch. Otherwise one thread copies the examples of a batch
    # while the calls wait, which takes a third of the throughput of images on two cores.
    options = tf.data.Options()
    options.experimental_optimization.map_and_batch_fusion = True
    batches = examples.batch(rows, drop_remainder=True).with_options(options)
    return batches.map(lambda batch, *mask: MaskedBatch(batch, mask[0] if mask else None))


def _map_rows(
    chunks: tf.data.Dataset, function: Callable[..., Any], *, source: Source, rows: int
) -> tf.data.Dataset:
    """Applies a function to every row of chunks of rows, in parallel and in order.

    Args:
        chunks: elements are tuples of tensors [rows, ...].
        function: takes the values of one row, returns an element of the result.
        source: the source of the rows.
        rows: number of rows in a chunk.
    """
    if source.row_bytes is None or source.row_bytes >= _LARGE_ROW:
        return chunks.unbatch().map(function, **PARALLEL)

    map_chunk = lambda *chunk: tf.data.Dataset.from_tensor_slices(chunk).map(function)  # noqa: E731
    # Several chunks are mapped at the same time; the order of their rows is kept.
    return chunks.interleave(map_chunk, block_length=rows, **PARALLEL)
