"""Turns any data that `build_dataset` may return into per-replica batches of static shape.

An element is a `MaskedBatch`, `(batch, row_mask)`: one replica's rows of a global batch, and a [rows]
float32 mask of the rows that exist. Replica r holds the rows [r b, (r + 1) b) of a global batch of B
rows, where b = ceil(B / replicas). Rows past the end of the global batch are padding, masked by 0.
Padding repeats the last row of the same global batch: zeros, or rows of another batch, might produce a
NaN. The mask is None if every row always exists, that is, in training if the replicas divide B.

Consecutive elements go to consecutive replicas of an input pipeline. So the rows and their order are
the same on any number of replicas and input pipelines.
"""

from collections.abc import Callable
import logging
import math
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data import sampler
from ctl.data.autograph import convert
from ctl.data.layout import Layout, WorkerShard
from ctl.data.source import (
    Arrays,
    Augment,
    Augmented,
    Data,
    GlobalBatches,
    MaskedBatch,
    PerReplica,
    RowSource,
    Source,
    dataset_of,
    source_of,
)
from ctl.errors import UsageError

_LOG = logging.getLogger("ctl")
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
_PARALLEL: dict[str, Any] = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}


def training_batches(
    data: Data,
    layout: Layout,
    *,
    seed: int,
    start: int,
    prefetch: int = 1,
    shard: WorkerShard | None = None,
) -> tf.data.Dataset:
    """Returns the endless training stream of one input pipeline, from a global step on.

    Args:
        data: the data of the training split. A `tf.data.Dataset` that shuffles must be a new object
            each time: a second iteration of the same object continues in another order.
        layout: which rows this pipeline feeds to which replicas.
        seed: the run's seed.
        start: the global step of the first batch.
        prefetch: number of global batches to prepare ahead; -1 lets tf.data choose.
        shard: the batches of one worker; None for all batches.

    Returns:
        A dataset of `MaskedBatch`es; for `PerReplica` data, of its batches.
    """
    source = source_of(data)
    if source is not None:
        size = batches_per_call(source, layout)
        read = _training_reader(source, layout, seed=seed, start=start, size=size, shard=shard)
        augment = data.augment if isinstance(data, Augmented) else None
        dataset = _source_batches(read, source, augment, layout, size=size)
    elif isinstance(data, PerReplica):
        dataset = _repeat(data.dataset, start, elements_per_step=layout.local_replicas)
    else:
        batch_size = layout.global_batch_size
        examples = _training_examples(data, start, batch_size=batch_size, seed=seed)
        # Every input pipeline forms the complete global batches and keeps its rows of them, so the
        # batches do not depend on the number of pipelines. The examples are endless:
        # drop_remainder only makes the shape static.
        batches = examples.batch(batch_size, drop_remainder=True)
        if shard is not None:
            batches = batches.shard(shard.num_workers, shard.index)
        dataset = _split(batches, layout, always_full=True)
    return _prefetch(dataset, layout, prefetch)


def training_chunks(
    data: Data, layout: Layout, *, seed: int, start: int, size: int
) -> tf.data.Dataset:
    """Like `training_batches` for one replica, with `size` batches stacked and without a mask."""
    if isinstance(data, Arrays):
        read = _training_reader(data, layout, seed=seed, start=start, size=size, shard=None)
        chunks = _array_batches(read, [size, layout.rows_per_replica])
        # One chunk ahead is enough: it holds many batches.
        return chunks.map(lambda element: element.batch).prefetch(1)
    elements = training_batches(data, layout, seed=seed, start=start, prefetch=2)
    batches = elements.map(lambda element: element.batch)
    return batches.batch(size, drop_remainder=True).prefetch(1)


def evaluation_batches(data: Data, layout: Layout, *, prefetch: int = 1) -> tf.data.Dataset:
    """Returns the evaluation stream of one input pipeline: every example once, in order.

    Args:
        data: the data of the evaluation split.
        layout: which rows this pipeline feeds to which replicas.
        prefetch: as for `training_batches`.

    Returns:
        A dataset of `MaskedBatch`es; for `PerReplica` data, of its batches. The stream of a
        `Source` repeats endlessly: each pass has `evaluation_steps` steps.
    """
    if isinstance(data, Source):
        dataset = _source_batches(_evaluation_reader(data, layout), data, None, layout, size=1)
    elif isinstance(data, PerReplica):
        _check_number_of_batches(data.dataset, layout)
        dataset = data.dataset
    else:
        batches = dataset_of(data).batch(layout.global_batch_size)
        dataset = _split(batches, layout, always_full=False)
    return _prefetch(dataset, layout, prefetch)


def evaluation_steps(data: Data, layout: Layout) -> int | None:
    """Returns the number of steps that read every example once; None if it is not known ahead."""
    if isinstance(data, Source):
        return math.ceil(len(data) / layout.global_batch_size)
    dataset = dataset_of(data)
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise UsageError("The evaluation dataset never ends: return one without repeat().")
    if dataset is not data or count == tf.data.UNKNOWN_CARDINALITY:
        return None  # batches may have any size
    return math.ceil(count / layout.global_batch_size)


def global_batches(data: GlobalBatches, *, start: int, endless: bool) -> tf.data.Dataset:
    """Returns complete global batches, for `experimental_distribute_dataset`."""
    return _repeat(data.dataset, start, elements_per_step=1) if endless else data.dataset


def all_examples(source: Source) -> tf.data.Dataset:
    """Returns every example once, in order, read and parsed in parallel; they are not batched."""
    rows = min(len(source), _ROWS_PER_READ)
    read = _reader(source)
    indexes = tf.data.Dataset.range(len(source)).batch(rows)
    chunks = indexes.map(lambda i: (read(i),), **_PARALLEL)
    if not isinstance(source, RowSource):
        return chunks.map(lambda batch: batch).unbatch()
    return _map_rows(chunks, source.parse, source=source, rows=rows)


def batches_per_call(source: Source, layout: Layout) -> int:
    """Returns how many per-replica batches to read in one call of `source.gather`.

    It reads several if the examples are small and known to be read fast. A user's own source may decode
    images: it is called once per batch, so that the calls run in parallel.
    """
    if source.row_bytes is None:
        return 1
    batch_bytes = max(1, int(source.row_bytes * layout.rows_per_replica))
    return max(1, min(MAX_BATCHES_PER_CALL, MAX_BYTES_PER_CALL // batch_bytes))


# Sources.

# The rows of several consecutive per-replica batches: the examples, [batches x rows, ...] tensors;
# their seeds for random augmentation, [batches x rows, 2] int64; and the mask of the rows that exist,
# [batches, rows] float32, or None if all rows exist.
_Chunk = tuple[Any, tf.Tensor, tf.Tensor | None]
_ReadChunk = Callable[[tf.Tensor], _Chunk]


def _reader(source: Source) -> Callable[[tf.Tensor], Any]:
    return source.read if isinstance(source, RowSource) else source.gather


def _training_reader(
    source: Source, layout: Layout, *, seed: int, start: int, size: int, shard: WorkerShard | None
) -> _ReadChunk:
    """Returns a function that reads the batches [index x size, (index + 1) x size) of the stream."""
    batch_size, local = layout.global_batch_size, layout.local_replicas
    first, stride = (start, 1) if shard is None else (start + shard.index, shard.num_workers)
    # A chunk touches at most this many steps; all its positions are less than `span` apart.
    span = ((size + local - 2) // local * stride + 1) * batch_size
    read = _reader(source)

    def read_chunk(index: tf.Tensor) -> _Chunk:
        positions, mask = _positions(layout, index, size=size, first=first, stride=stride)
        indexes, seeds = source.training_order(
            positions, batch_size=batch_size, seed=seed, span=span
        )
        return read(indexes), seeds, mask

    return read_chunk


def _evaluation_reader(source: Source, layout: Layout) -> _ReadChunk:
    """Returns a function that reads a batch of an evaluation, without seeds."""
    read = _reader(source)
    batches = math.ceil(len(source) / layout.global_batch_size) * layout.local_replicas

    def read_chunk(index: tf.Tensor) -> _Chunk:
        positions, mask = _positions(layout, index % batches, examples=len(source))
        indexes = source.evaluation_order(positions, batch_size=layout.global_batch_size)
        return read(indexes), tf.zeros([layout.rows_per_replica, 2], tf.int64), mask

    return read_chunk


def _positions(
    layout: Layout,
    index: tf.Tensor,
    *,
    size: int = 1,
    first: int | tf.Tensor = 0,
    stride: int = 1,
    examples: int | None = None,
) -> tuple[tf.Tensor, tf.Tensor | None]:
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
    all_exist = examples is None and layout.even
    return existing, None if all_exist else tf.cast(offsets <= last, tf.float32)


def _source_batches(
    read_chunk: _ReadChunk, source: Source, augment: Augment | None, layout: Layout, *, size: int
) -> tf.data.Dataset:
    """Returns the batches of chunks, each example of which is parsed and augmented if necessary."""
    if augment is not None or isinstance(source, RowSource):
        return _map_examples(read_chunk, source, augment, layout, size=size)
    if size == 1:
        return _array_batches(read_chunk, [layout.rows_per_replica])
    return _array_batches(read_chunk, [size, layout.rows_per_replica]).unbatch()


def _array_batches(read_chunk: _ReadChunk, leading: list[int]) -> tf.data.Dataset:
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

    def chunk_rows(index: tf.Tensor) -> tuple[Any, ...]:
        examples, seeds, row_mask = read_chunk(index)
        return examples, seeds, *(() if row_mask is None else (tf.reshape(row_mask, [-1]),))

    def make_example(row: Any, seed: tf.Tensor, *mask: tf.Tensor) -> tuple[Any, ...]:
        example = convert(source.parse)(row) if isinstance(source, RowSource) else row
        return example if augment is None else convert(augment)(example, seed), *mask

    chunks = tf.data.Dataset.range(_ENDLESS).map(chunk_rows, **_PARALLEL)
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
        return chunks.unbatch().map(function, **_PARALLEL)

    def map_chunk(*chunk: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(chunk).map(function)

    # Several chunks are mapped at the same time; the order of their rows is kept.
    return chunks.interleave(map_chunk, block_length=rows, **_PARALLEL)


# Datasets.


def _split(batches: tf.data.Dataset, layout: Layout, *, always_full: bool) -> tf.data.Dataset:
    """Splits global batches into one element `(batch, row_mask)` per local replica."""
    # The batch is used as it is: the gather below would copy it.
    if always_full and layout.replicas == 1:
        return batches.map(lambda batch: MaskedBatch(batch, None))
    count = layout.rows_per_replica
    replicas = tf.range(layout.first_replica, layout.first_replica + layout.local_replicas)
    rows = replicas[:, tf.newaxis] * count + tf.range(count)[tf.newaxis, :]

    def split(batch: Any) -> MaskedBatch:
        # The last batch of an evaluation may be partial: its size is known only here.
        size = tf.shape(tf.nest.flatten(batch)[0])[0]
        padded = tf.nest.map_structure(lambda x: tf.gather(x, tf.minimum(rows, size - 1)), batch)
        row_mask = None if always_full and layout.even else tf.cast(rows < size, tf.float32)
        return MaskedBatch(padded, row_mask)

    return batches.map(split, **_PARALLEL).unbatch()


def _training_examples(data: Any, start: int, *, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns the endless examples of a dataset from a global step on, augmented if `Augmented`."""
    examples = _repeat(dataset_of(data), start, elements_per_step=batch_size)
    if not isinstance(data, Augmented):
        return examples

    def augment(position: tf.Tensor, example: Any) -> Any:
        return convert(data.augment)(example, sampler.position_seed(position, seed=seed))

    # The positions of a resumed run continue those of the interrupted one. The skipped examples are
    # read again, but not augmented.
    numbered = examples.enumerate(start=start * batch_size)
    return numbered.map(augment, **_PARALLEL)


def _check_number_of_batches(dataset: tf.data.Dataset, layout: Layout) -> None:
    """Raises UsageError if tf.distribute would drop the last batches of an evaluation.

    It drops them if their shapes are static, because it cannot give a replica an empty batch then.
    """
    rest = max(0, int(dataset.cardinality())) % layout.local_replicas
    if rest and all(s.shape.is_fully_defined() for s in tf.nest.flatten(dataset.element_spec)):
        raise UsageError(
            f"The evaluation data ends with {rest} batches for {layout.local_replicas} replicas, "
            "which would be dropped: batch it without drop_remainder, or add batches."
        )


def _prefetch(dataset: tf.data.Dataset, layout: Layout, prefetch: int) -> tf.data.Dataset:
    """Prefetches global batches; each has one element per local replica."""
    return dataset.prefetch(prefetch if prefetch < 0 else prefetch * layout.local_replicas)


def _repeat(dataset: tf.data.Dataset, start: int, *, elements_per_step: int) -> tf.data.Dataset:
    """Repeats a dataset endlessly and skips the elements of the first `start` steps."""
    if start:
        _LOG.warning(
            "The training data is a tf.data.Dataset: to resume at step %d, all batches before it "
            "are read again and dropped. A ctl.data.Source would seek.",
            start,
        )
    # repeat() comes first: `start` may lie in any epoch, and the number of examples may be unknown.
    return dataset.repeat().skip(start * elements_per_step)
