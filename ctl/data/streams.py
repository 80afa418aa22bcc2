"""The examples of a source as a stream of per-replica batches, `MaskedBatch`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.data import sampler
from ctl.data.layout import Layout, WorkerShard
from ctl.data.source import Arrays, Augment, Indexes, MaskedBatch, Source

# Limits of one call of the sampler and of a source in memory. A call costs 0.1 ms however many
# examples it reads, and its result should stay in the processor's cache until it is used.
MAX_BATCHES_PER_CALL = 16
MAX_BYTES_PER_CALL = 2 * 2**20


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
    augment: Augment,
    layout: Layout,
    *,
    seed: int,
    start: int,
    shard: WorkerShard | None = None,
) -> tf.data.Dataset:
    """Like `training_batches`, with `augment(example, seed)` applied to each example."""
    size = batches_per_call(source, layout)
    read_chunk = _chunk_reader(source, layout, seed=seed, start=start, size=size, shard=shard)

    def rows(index: tf.Tensor) -> tuple[Any, ...]:
        chunk = read_chunk(index)
        masks = () if chunk.row_mask is None else (tf.reshape(chunk.row_mask, [-1]),)
        return chunk.examples, chunk.seeds, *masks

    def augment_row(example: Any, seed: tf.Tensor, *mask: tf.Tensor) -> tuple[Any, ...]:
        return augment(example, seed), *mask

    auto = tf.data.AUTOTUNE
    chunks = tf.data.Dataset.counter().map(rows, num_parallel_calls=auto, deterministic=True)
    # Augmentation is the expensive part, so it runs in parallel over rows, not over chunks.
    examples = chunks.unbatch().map(augment_row, num_parallel_calls=auto, deterministic=True)
    batches = examples.batch(layout.rows_per_replica, drop_remainder=True)
    if layout.even:
        return batches.map(lambda batch: MaskedBatch(batch, None))
    return batches.map(MaskedBatch)


def evaluation_batches(source: Source, layout: Layout) -> tf.data.Dataset:
    """Returns a stream of `(batch, row_mask)`: every example once, in order, then only padding.

    The stream is endless, so that every input pipeline can be read for the same number of steps.
    """
    offsets = tf.range(layout.rows_per_replica, dtype=tf.int64)
    batch_size, local = layout.global_batch_size, layout.local_replicas
    count = len(source)

    def element(index: tf.Tensor) -> MaskedBatch:
        step, replica = index // local, layout.first_replica + index % local
        positions = step * batch_size + replica * layout.rows_per_replica + offsets
        # Padding repeats the last example of the batch; after the end, the last of all.
        end = tf.minimum((step + 1) * batch_size, count)
        examples = source.gather(tf.minimum(positions, end - 1))
        return MaskedBatch(examples, tf.cast(positions < end, tf.float32))

    counter = tf.data.Dataset.counter()
    return counter.map(element, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def batches_per_call(source: Source, layout: Layout) -> int:
    """Returns how many per-replica batches to read in one call of `source.gather`.

    Several if the examples are in memory. A user's own source may decode images: it is called once
    per batch, so that the calls run in parallel.
    """
    if not isinstance(source, Arrays | Indexes):
        return 1
    batch_bytes = max(1, source.row_bytes * layout.rows_per_replica)
    return max(1, min(MAX_BATCHES_PER_CALL, MAX_BYTES_PER_CALL // batch_bytes))


def _chunk_reader(
    source: Source, layout: Layout, *, seed: int, start: int, size: int, shard: WorkerShard | None
) -> Callable[[tf.Tensor], Chunk]:
    """Returns a function that reads the batches [index x size, (index + 1) x size) of the stream."""
    batch_size, local, count = layout.global_batch_size, layout.local_replicas, len(source)
    elements = tf.range(size, dtype=tf.int64)[:, tf.newaxis]
    offsets = tf.range(layout.rows_per_replica, dtype=tf.int64)[tf.newaxis, :]
    first, stride = (start, 1) if shard is None else (start + shard.index, shard.num_workers)
    # A chunk touches at most this many steps; all its positions are less than `span` apart.
    span = ((size + local - 2) // local * stride + 1) * batch_size

    def read_chunk(index: tf.Tensor) -> Chunk:
        element = index * size + elements
        step, replica = first + element // local * stride, layout.first_replica + element % local
        rows = replica * layout.rows_per_replica + offsets
        # Padding repeats the last row of the same global batch.
        positions = tf.reshape(step * batch_size + tf.minimum(rows, batch_size - 1), [-1])
        indexes = sampler.example_indexes(positions, count=count, seed=seed, span=span)
        seeds = sampler.augmentation_seeds(positions, indexes, count=count, seed=seed, span=span)
        row_mask = None if layout.even else tf.cast(rows < batch_size, tf.float32)
        return Chunk(source.gather(indexes), seeds, row_mask)

    return read_chunk
