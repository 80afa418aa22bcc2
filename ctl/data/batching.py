"""Turns any data that `build_dataset` may return into per-replica batches of static shape.

An element is a `MaskedBatch`, `(batch, row_mask)`: one replica's rows of a global batch, and a [rows]
float32 mask of the rows that exist. Replica r holds the rows [r b, (r + 1) b) of a global batch of B
rows, where b = ceil(B / replicas). Rows past the end of the global batch are padding, masked by 0.
Padding repeats the last row of the same global batch: zeros, or rows of another batch, might produce a
NaN. The mask is None if every row always exists, that is, in training if the replicas divide B.

Consecutive elements go to consecutive replicas of an input pipeline. So the rows and their order are
the same on any number of replicas and input pipelines.
"""

import logging
import math
from typing import Any

import tensorflow as tf

from ctl.data import sampler, streams
from ctl.data.autograph import convert
from ctl.data.layout import Layout, WorkerShard
from ctl.data.source import (
    Arrays,
    Augmented,
    Data,
    GlobalBatches,
    Indexes,
    MaskedBatch,
    PerReplica,
    Source,
    dataset_of,
)
from ctl.errors import UsageError

_LOG = logging.getLogger("ctl")


def training_batches(
    data: Data,
    layout: Layout,
    *,
    seed: int,
    start: int,
    prefetch: int,
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
    if isinstance(data, Source):
        dataset = streams.training_batches(data, layout, seed=seed, start=start, shard=shard)
    elif isinstance(data, Augmented) and isinstance(data.data, Source):
        dataset = streams.augmented_training_batches(
            data.data, data.augment, layout, seed=seed, start=start, shard=shard
        )
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
    if isinstance(data, Arrays | Indexes):
        chunks = streams.training_chunks(data, layout, seed=seed, start=start, size=size)
        # One chunk ahead is enough: it holds many batches.
        return chunks.map(lambda element: element.batch).prefetch(1)
    elements = training_batches(data, layout, seed=seed, start=start, prefetch=2)
    batches = elements.map(lambda element: element.batch)
    return batches.batch(size, drop_remainder=True).prefetch(1)


def evaluation_batches(data: Data, layout: Layout, *, prefetch: int) -> tf.data.Dataset:
    """Returns the evaluation stream of one input pipeline: every example once, in order.

    Args:
        data: the data of the evaluation split.
        layout: which rows this pipeline feeds to which replicas.
        prefetch: as for `training_batches`.

    Returns:
        A dataset of `MaskedBatch`es; for `PerReplica` data, of its batches. The stream of a
        `Source` continues with padding endlessly: read `evaluation_steps` steps of it.
    """
    if isinstance(data, Source):
        dataset = streams.evaluation_batches(data, layout)
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

    split_batches = batches.map(split, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return split_batches.unbatch()


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
    return numbered.map(augment, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


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
