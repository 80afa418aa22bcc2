"""Turns the examples of a source into a stream of per-replica batches, `MaskedBatch`es."""

from collections.abc import Callable
from typing import Any, NamedTuple

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


class Chunk(NamedTuple):
    """The rows of several consecutive per-replica batches, concatenated.

    Attributes:
        examples: [batches x rows, ...] tensors.
        seeds: [batches x rows, 2] int64 seeds for random augmentation.
        row_mask: [batches, rows] float32, 1 for rows that exist; None if all rows exist.
    """

    examples: Any
    seeds: tf.Tensor
    row_mask: tf.Tensor | None


def training_batches(
    source: Source, layout: Layout, *, seed: int, start: int, shard: WorkerShard | None = None
) -> tf.data.Dataset:
    """Returns the endless, shuffled stream of `(batch, row_mask)` from a global step on.

    Args:
        source: the examples.
        layout: which rows this pipeline feeds to which replicas.
        seed: the run's seed.
        start: the global step of the first batch.
        shard: the batches of one worker; None for all batches.
    """
    if isinstance(source, RowSource):
        return augmented_training_batches(source, None, layout, seed=seed, start=start, shard=shard)
    size = batches_per_call(source, layout)
    chunks = training_chunks(source, layout, seed=seed, start=start, size=size, shard=shard)
    if size > 1:
        return chunks.unbatch()

    def first(values: tf.Tensor | None) -> tf.Tensor | None:
        return None if values is None else values[0]

    # Unlike unbatch, this does not copy the batch.
    return chunks.map(lambda chunk: tf.nest.map_structure(first, chunk))


def training_chunks(
    source: Source,
    layout: Layout,
    *,
    seed: int,
    start: int,
    size: int,
    shard: WorkerShard | None = None,
) -> tf.data.Dataset:
    """Like `training_batches`, but with `size` elements stacked along a new first axis."""
    read_chunk = _chunk_reader(source, layout, seed=seed, start=start, size=size, shard=shard)
    rows = layout.rows_per_replica

    def unflatten(values: tf.Tensor) -> tf.Tensor:
        shape = tf.concat([[size, rows], tf.shape(values)[1:]], axis=0)
        return tf.ensure_shape(tf.reshape(values, shape), [size, rows, *values.shape[1:]])

    def stacked_batches(index: tf.Tensor) -> MaskedBatch:
        chunk = read_chunk(index)
        return MaskedBatch(tf.nest.map_structure(unflatten, chunk.examples), chunk.row_mask)

    # One call per core, unless calls are so large that two saturate the memory bandwidth.
    calls = tf.data.AUTOTUNE if size <= MAX_BATCHES_PER_CALL else 2
    counter = tf.data.Dataset.counter()
    return counter.map(stacked_batches, num_parallel_calls=calls, deterministic=True)


def augmented_training_batches(
    source: Source,
    augment: Augment | None,
    layout: Layout,
    *,
    seed: int,
    start: int,
    shard: WorkerShard | None = None,
) -> tf.data.Dataset:
    """Like `training_batches`, with `augment(example, seed)` applied to each example.

    The rows of a `RowSource` are parsed in the same call; `augment` may then be None.
    """
    size = batches_per_call(source, layout)
    read_chunk = _chunk_reader(source, layout, seed=seed, start=start, size=size, shard=shard)

    def chunk_rows(index: tf.Tensor) -> tuple[Any, ...]:
        chunk = read_chunk(index)
        masks = () if chunk.row_mask is None else (tf.reshape(chunk.row_mask, [-1]),)
        return chunk.examples, chunk.seeds, *masks

    def make_example(row: Any, seed: tf.Tensor, *mask: tf.Tensor) -> tuple[Any, ...]:
        example = convert(source.parse)(row) if isinstance(source, RowSource) else row
        return example if augment is None else convert(augment)(example, seed), *mask

    auto = tf.data.AUTOTUNE
    chunks = tf.data.Dataset.counter().map(chunk_rows, num_parallel_calls=auto, deterministic=True)
    rows = layout.rows_per_replica
    examples = _map_rows(chunks, make_example, source=source, rows=size * rows)
    batches = _fuse(examples.batch(rows, drop_remainder=True))
    if layout.even:
        return batches.map(lambda batch: MaskedBatch(batch, None))
    return batches.map(MaskedBatch)


def evaluation_batches(source: Source, layout: Layout) -> tf.data.Dataset:
    """Returns a stream of `(batch, row_mask)`: every example once, in order, then only padding.

    The stream is endless, so that every input pipeline can be read for the same number of steps.
    """
    rows = layout.rows_per_replica
    offsets = tf.range(rows, dtype=tf.int64)
    batch_size, local = layout.global_batch_size, layout.local_replicas
    count = len(source)
    read = source.read if isinstance(source, RowSource) else source.gather

    def element(index: tf.Tensor) -> MaskedBatch:
        step, replica = index // local, layout.first_replica + index % local
        positions = step * batch_size + replica * rows + offsets
        # Padding repeats the last example of the batch; after the end, the last of all.
        end = tf.minimum((step + 1) * batch_size, count)
        indexes = source.evaluation_order(tf.minimum(positions, end - 1), batch_size=batch_size)
        examples = read(indexes)
        return MaskedBatch(examples, tf.cast(positions < end, tf.float32))

    counter = tf.data.Dataset.counter()
    batches = counter.map(element, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    if not isinstance(source, RowSource):
        return batches
    chunks = batches.map(tuple)  # tf.data does not unpack a named tuple into arguments

    def parse(row: Any, mask: tf.Tensor) -> tuple[Any, tf.Tensor]:
        return convert(source.parse)(row), mask

    examples = _map_rows(chunks, parse, source=source, rows=rows)
    return examples.batch(rows, drop_remainder=True).map(MaskedBatch)


def _fuse(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Lets the calls of the map before `batch` write into the batch.

    Otherwise one thread copies the examples of a batch while the calls of the map wait, which takes a
    third of the throughput of images on two cores.
    """
    options = tf.data.Options()
    options.experimental_optimization.map_and_batch_fusion = True
    return batches.with_options(options)


def all_examples(source: Source) -> tf.data.Dataset:
    """Returns every example once, in order, read and parsed in parallel; they are not batched."""
    rows, auto = min(len(source), _ROWS_PER_READ), tf.data.AUTOTUNE
    read = source.read if isinstance(source, RowSource) else source.gather
    indexes = tf.data.Dataset.range(len(source)).batch(rows)
    chunks = indexes.map(lambda i: (read(i),), num_parallel_calls=auto, deterministic=True)
    if not isinstance(source, RowSource):
        return chunks.map(lambda batch: batch).unbatch()
    return _map_rows(chunks, source.parse, source=source, rows=rows)


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
    auto = tf.data.AUTOTUNE
    if source.row_bytes is None or source.row_bytes >= _LARGE_ROW:
        return chunks.unbatch().map(function, num_parallel_calls=auto, deterministic=True)

    def map_chunk(*chunk: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(chunk).map(function)

    # Several chunks are mapped at the same time; the order of their rows is kept.
    return chunks.interleave(
        map_chunk, block_length=rows, num_parallel_calls=auto, deterministic=True
    )


def batches_per_call(source: Source, layout: Layout) -> int:
    """Returns how many per-replica batches to read in one call of `source.gather`.

    It reads several if the examples are small and known to be read fast. A user's own source may decode
    images: it is called once per batch, so that the calls run in parallel.
    """
    if source.row_bytes is None:
        return 1
    batch_bytes = max(1, int(source.row_bytes * layout.rows_per_replica))
    return max(1, min(MAX_BATCHES_PER_CALL, MAX_BYTES_PER_CALL // batch_bytes))


def _chunk_reader(
    source: Source, layout: Layout, *, seed: int, start: int, size: int, shard: WorkerShard | None
) -> Callable[[tf.Tensor], Chunk]:
    """Returns a function that reads the batches [index x size, (index + 1) x size) of the stream."""
    batch_size, local = layout.global_batch_size, layout.local_replicas
    elements = tf.range(size, dtype=tf.int64)[:, tf.newaxis]
    offsets = tf.range(layout.rows_per_replica, dtype=tf.int64)[tf.newaxis, :]
    read = source.read if isinstance(source, RowSource) else source.gather
    first, stride = (start, 1) if shard is None else (start + shard.index, shard.num_workers)
    # A chunk touches at most this many steps; all its positions are less than `span` apart.
    span = ((size + local - 2) // local * stride + 1) * batch_size

    def read_chunk(index: tf.Tensor) -> Chunk:
        element = index * size + elements
        step, replica = first + element // local * stride, layout.first_replica + element % local
        rows = replica * layout.rows_per_replica + offsets
        # Padding repeats the last row of the same global batch.
        positions = tf.reshape(step * batch_size + tf.minimum(rows, batch_size - 1), [-1])
        indexes, seeds = source.training_order(
            positions, batch_size=batch_size, seed=seed, span=span
        )
        row_mask = None if layout.even else tf.cast(rows < batch_size, tf.float32)
        return Chunk(read(indexes), seeds, row_mask)

    return read_chunk
