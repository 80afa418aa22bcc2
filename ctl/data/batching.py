"""Sampler + source (or a dataset) -> what `distribute_datasets_from_function` feeds to the step.

An element is `(batch, present)`: one replica's rows of a global batch, of static shape, and the
mask of the rows that exist. Replica r holds rows [r b, (r + 1) b) of the global batch of B rows,
b = ceil(B / replicas); rows past the end repeat the last row of the same global batch and are
masked, since zeros or rows of elsewhere could bring a NaN in. The mask is None where all rows
always exist: in training, if the replicas divide B. Consecutive elements go to consecutive
replicas of an input pipeline, so the rows and their order are the same on any number of replicas
and pipelines.
"""

import logging
import math
from typing import Any, TypeAlias

import tensorflow as tf

from ctl.data import augmentation, sampler, streams
from ctl.data.augmentation import Augmented
from ctl.data.layout import Layout, WorkerShard
from ctl.data.source import Arrays, GlobalBatches, Indexes, PerReplica, Source
from ctl.errors import UsageError

_LOG = logging.getLogger("ctl")
Data: TypeAlias = Source | tf.data.Dataset | Augmented | GlobalBatches | PerReplica


def training(
    data: Data,
    layout: Layout,
    *,
    seed: int,
    start: int,
    prefetch: int,
    turns: WorkerShard | None = None,
) -> tf.data.Dataset:
    """The endless training stream of one input pipeline, from a step on.

    Args:
        data: what the trainer's `build_dataset("train", ...)` returned. A `tf.data.Dataset` that
            shuffles must be a new one: iterated again, the same object goes on in another order.
        layout: which rows this pipeline feeds to which replicas.
        seed: the run's seed.
        start: the global step of the first batch.
        prefetch: batches to prepare ahead, each with a share for every local replica; -1 lets
            tf.data choose.
        turns: which batches from `start` on, where not all.

    Returns:
        A dataset of `(batch, present)`; of a `PerReplica` its batches, as they are.
    """
    if isinstance(data, Source):
        dataset = streams.training(data, layout, seed=seed, start=start, turns=turns)
    elif isinstance(data, Augmented) and isinstance(data.data, Source):
        dataset = streams.augmented(
            data.data, data.augment, layout, seed=seed, start=start, turns=turns
        )
    elif isinstance(data, PerReplica):
        dataset = _endless(data.dataset, start, each=layout.local_replicas)
    else:
        size = layout.global_batch_size
        examples = _examples(data, start, each=size, seed=seed)
        batches = examples.batch(size, drop_remainder=True)
        if turns is not None:
            batches = batches.shard(turns.count, turns.index)
        dataset = _split(batches, layout, full=True)
    return _prefetched(dataset, layout, prefetch)


def training_chunks(
    data: Data, layout: Layout, *, seed: int, start: int, size: int
) -> tf.data.Dataset:
    """As `training`, for one replica, `size` whole batches on a first axis and no mask."""
    if isinstance(data, Arrays | Indexes):
        chunks = streams.training_chunks(data, layout, seed=seed, start=start, size=size)
        return chunks.map(lambda batch, present: batch).prefetch(1)
    batches = training(data, layout, seed=seed, start=start, prefetch=2)
    whole = batches.map(lambda batch, present: batch)
    return whole.batch(size, drop_remainder=True).prefetch(1)


def evaluation(data: Data, layout: Layout, *, prefetch: int) -> tf.data.Dataset:
    """The evaluation stream of one input pipeline: every example once, in order.

    Args:
        data: what the trainer's `build_dataset("eval", ...)` returned.
        layout: which rows this pipeline feeds to which replicas.
        prefetch: as for `training`.

    Returns:
        A dataset of `(batch, present)`; of a `PerReplica` its batches, as they are. That of a
        `Source` goes on with absent rows for ever: run `evaluation_steps` steps of it.
    """
    if isinstance(data, Source):
        dataset = streams.evaluation(data, layout)
    elif isinstance(data, PerReplica):
        _check_tail(data.dataset, layout)
        dataset = data.dataset
    else:
        dataset = _split(_dataset(data).batch(layout.global_batch_size), layout, full=False)
    return _prefetched(dataset, layout, prefetch)


def evaluation_steps(data: Data, layout: Layout) -> int | None:
    """How many steps see every example once, or None where only the data's end will tell."""
    if isinstance(data, Source):
        return math.ceil(len(data) / layout.global_batch_size)
    dataset = _dataset(data)
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise UsageError("The evaluation dataset never ends: return one without repeat().")
    if dataset is not data or count == tf.data.UNKNOWN_CARDINALITY:
        return None
    return math.ceil(count / layout.global_batch_size)


def global_batches(data: GlobalBatches, *, start: int, endless: bool) -> tf.data.Dataset:
    """The ready global batches, as they are, for `experimental_distribute_dataset`."""
    return _endless(data.dataset, start, each=1) if endless else data.dataset


def element_spec(data: Data) -> dict[str, tf.TensorSpec]:
    """The spec of a batch with an unknown number of rows, to build the model by.

    Raises:
        UsageError: the elements are not dicts of tensors of known rank.
    """
    if isinstance(data, Augmented):
        example = tf.nest.map_structure(
            lambda s: tf.TensorSpec(s.shape[1:], s.dtype), element_spec(data.data)
        )
        spec, batched = augmentation.output_spec(data.augment, example), False
    elif isinstance(data, Source):
        gather = tf.function(data.gather, autograph=False)
        indexes = tf.TensorSpec([None], tf.int64)
        outputs = gather.get_concrete_function(indexes).structured_outputs
        spec, batched = tf.nest.map_structure(tf.TensorSpec.from_tensor, outputs), True
    else:
        spec, batched = _dataset(data).element_spec, isinstance(data, GlobalBatches | PerReplica)
    if not isinstance(spec, dict) or not spec:
        raise UsageError(
            f"The data's elements are {spec}: want dicts, as from "
            '`dataset.map(lambda x, y: {"x": x, "label": y})`.'
        )
    return tf.nest.map_structure(lambda s: _rows_spec(s, batched, spec), spec)


def check_data(data: Any, split: str) -> None:
    """Refuses what `build_dataset` may not return."""
    if not isinstance(data, Source | tf.data.Dataset | Augmented | GlobalBatches | PerReplica):
        raise UsageError(
            f"build_dataset({split!r}, ...) returned {type(data).__name__}: want a "
            "ctl.data.Source, a tf.data.Dataset of examples, ctl.data.augmented(...), "
            "ctl.data.GlobalBatches or ctl.data.PerReplica."
        )
    if isinstance(data, Augmented) and split != "train":
        raise UsageError(
            f"build_dataset({split!r}, ...) returned augmented examples: return them as they are."
        )
    source = source_of(data)
    count = len(source) if source is not None else int(_dataset(data).cardinality())
    if count == 0:
        raise UsageError(f"build_dataset({split!r}, ...) returned no examples: want at least one.")
    element_spec(data)


def source_of(data: Data) -> Source | None:
    """The source that the examples come from, augmented or not; None where there is none."""
    examples = data.data if isinstance(data, Augmented) else data
    return examples if isinstance(examples, Source) else None


def _split(batches: tf.data.Dataset, layout: Layout, *, full: bool) -> tf.data.Dataset:
    """Global batches -> each local replica's rows, one element a replica."""
    if full and layout.replicas == 1:
        return batches.map(lambda batch: (batch, None))
    replicas = tf.range(layout.first_replica, layout.first_replica + layout.local_replicas)
    rows = replicas[:, tf.newaxis] * layout.rows + tf.range(layout.rows)[tf.newaxis, :]

    def split(batch: Any) -> tuple[Any, tf.Tensor | None]:
        size = tf.shape(tf.nest.flatten(batch)[0])[0]
        shares = tf.nest.map_structure(lambda x: tf.gather(x, tf.minimum(rows, size - 1)), batch)
        return shares, None if full and layout.even else tf.cast(rows < size, tf.float32)

    split_batches = batches.map(split, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return split_batches.unbatch()


def _dataset(data: Any) -> tf.data.Dataset:
    if isinstance(data, GlobalBatches | PerReplica):
        return data.dataset
    return data.data if isinstance(data, Augmented) else data


def _examples(data: Any, start: int, *, each: int, seed: int) -> tf.data.Dataset:
    """The endless examples of a dataset, from a step on, augmented where asked for."""
    examples = _endless(_dataset(data), start, each=each)
    if not isinstance(data, Augmented):
        return examples

    def augment(position: tf.Tensor, example: Any) -> Any:
        return data.augment(example, sampler.stream_seed(position, seed=seed))

    numbered = examples.enumerate(start=start * each)
    return numbered.map(augment, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _check_tail(dataset: tf.data.Dataset, layout: Layout) -> None:
    """Refuses batches of static shape of which tf.distribute would drop the last ones."""
    tail = max(0, int(dataset.cardinality())) % layout.local_replicas
    if tail and all(s.shape.is_fully_defined() for s in tf.nest.flatten(dataset.element_spec)):
        raise UsageError(
            f"The evaluation data ends with {tail} batches for {layout.local_replicas} replicas: "
            "they would be dropped, so batch it without drop_remainder, or add batches."
        )


def _rows_spec(spec: Any, batched: bool, whole: Any) -> tf.TensorSpec:
    """The spec of a feature of several examples; `batched` where `spec` has the axis of rows."""
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None or spec.shape.rank < batched:
        raise UsageError(
            f"The data's elements are {whole}: want dense tensors of known rank"
            f"{', their first axis the rows' * batched} (tf.ensure_shape, tf.sparse.to_dense)."
        )
    return tf.TensorSpec([None, *(spec.shape[1:] if batched else spec.shape)], spec.dtype)


def _prefetched(dataset: tf.data.Dataset, layout: Layout, prefetch: int) -> tf.data.Dataset:
    return dataset.prefetch(prefetch if prefetch < 0 else prefetch * layout.local_replicas)


def _endless(dataset: tf.data.Dataset, start: int, *, each: int) -> tf.data.Dataset:
    """The dataset over and over, without the elements of the first `start` steps, `each` a step."""
    if start:
        _LOG.warning(
            "The training data is a tf.data.Dataset: to go on at step %d, all batches before it "
            "are read again and dropped. A ctl.data.Source would seek.",
            start,
        )
    return dataset.repeat().skip(start * each)
