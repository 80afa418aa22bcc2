"""Sampler + source (or a dataset) -> what `distribute_datasets_from_function` feeds to the step.

An element is `(batch, present)`: one replica's rows of a global batch, of static shape, and the
mask of the rows that exist. Replica r holds rows [r b, (r + 1) b) of the global batch of B rows,
b = ceil(B / replicas); rows past the end repeat the last row of the same global batch and are
masked, since zeros or rows of elsewhere could bring a NaN in. The mask is None where all rows
always exist: in training, if the replicas divide B. Consecutive elements go to consecutive
replicas of an input pipeline, so the rows and their order are the same on any number of replicas
and pipelines.
"""

import dataclasses
import logging
import math
from typing import Any, TypeAlias

import tensorflow as tf

from ctl.data import sampler
from ctl.data.source import Arrays, GlobalBatches, Indexes, PerReplica, Source
from ctl.errors import UsageError

_LOG = logging.getLogger("ctl")
# One call of the sampler and of a source in memory draws so much: a call costs 0.1 ms whatever it
# draws, and what it drew stays in the processor's cache until it is read.
MOST_AT_ONCE = 16  # per-replica batches
BYTES_AT_ONCE = 2 * 2**20
Data: TypeAlias = Source | tf.data.Dataset | GlobalBatches | PerReplica


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which rows of a global batch the replicas of one input pipeline hold.

    Attributes:
        global_batch_size: rows of a full global batch.
        replicas: replicas of all pipelines together.
        pipelines: input pipelines, one a worker as a rule.
        pipeline: which of them this is.
    """

    global_batch_size: int
    replicas: int
    pipelines: int = 1
    pipeline: int = 0

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise UsageError(f"global_batch_size is {self.global_batch_size}, want at least 1.")

    @property
    def rows(self) -> int:
        """Rows that each replica gets."""
        return math.ceil(self.global_batch_size / self.replicas)

    @property
    def local_replicas(self) -> int:
        """Replicas that this pipeline feeds."""
        return self.replicas // self.pipelines

    @property
    def first_replica(self) -> int:
        """The first replica that this pipeline feeds."""
        return self.pipeline * self.local_replicas

    @property
    def even(self) -> bool:
        """Whether all replicas get equally many rows of a full batch."""
        return self.rows * self.replicas == self.global_batch_size

    def shares(self) -> list[int]:
        """How many rows of a full batch exist on each replica."""
        ends = [min((r + 1) * self.rows, self.global_batch_size) for r in range(self.replicas)]
        return [max(0, end - r * self.rows) for r, end in enumerate(ends)]

    @classmethod
    def of(cls, context: tf.distribute.InputContext, global_batch_size: int) -> "Layout":
        """The layout of the pipeline that `context` describes."""
        return cls(
            global_batch_size=global_batch_size,
            replicas=context.num_replicas_in_sync,
            pipelines=context.num_input_pipelines,
            pipeline=context.input_pipeline_id,
        )


def training(
    data: Data, layout: Layout, *, seed: int, start: int, prefetch: int
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

    Returns:
        A dataset of `(batch, present)`; of a `PerReplica` its batches, as they are.
    """
    if isinstance(data, Source):
        dataset = _train_source(data, layout, seed=seed, start=start)
    elif isinstance(data, PerReplica):
        dataset = _endless(data.dataset, start, each=layout.local_replicas)
    else:
        size = layout.global_batch_size
        batches = _endless(_examples(data), start, each=size).batch(size, drop_remainder=True)
        dataset = _split(batches, layout, full=True)
    return _prefetched(dataset, layout, prefetch)


def training_chunks(
    data: Data, layout: Layout, *, seed: int, start: int, size: int
) -> tf.data.Dataset:
    """As `training`, for one replica, `size` whole batches on a first axis and no mask."""
    if isinstance(data, Arrays | Indexes):
        chunks = drawn_batches(data, layout, seed=seed, start=start, size=size)
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
        dataset = _eval_source(data, layout)
    elif isinstance(data, PerReplica):
        _check_tail(data.dataset, layout)
        dataset = data.dataset
    else:
        dataset = _split(_examples(data).batch(layout.global_batch_size), layout, full=False)
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
    if isinstance(data, Source):
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


def check(data: Any, split: str) -> None:
    """Refuses what `build_dataset` may not return."""
    if not isinstance(data, Source | tf.data.Dataset | GlobalBatches | PerReplica):
        raise UsageError(
            f"build_dataset({split!r}, ...) returned {type(data).__name__}: want a "
            "ctl.data.Source, a tf.data.Dataset of examples, ctl.data.GlobalBatches or "
            "ctl.data.PerReplica."
        )
    count = len(data) if isinstance(data, Source) else int(_dataset(data).cardinality())
    if count == 0:
        raise UsageError(f"build_dataset({split!r}, ...) returned no examples: want at least one.")
    element_spec(data)


def _train_source(source: Source, layout: Layout, *, seed: int, start: int) -> tf.data.Dataset:
    """One element a local replica; examples in memory are drawn many batches at a call."""
    size = at_once(source, layout)
    drawn = drawn_batches(source, layout, seed=seed, start=start, size=size)
    if size > 1:
        return drawn.unbatch()
    return drawn.map(  # does not copy the batch, as unbatch would
        lambda batch, present: (
            tf.nest.map_structure(lambda x: x[0], batch),
            None if present is None else present[0],
        )
    )


def drawn_batches(
    source: Source, layout: Layout, *, seed: int, start: int, size: int
) -> tf.data.Dataset:
    """The endless training stream of a source, `size` elements of `training` on a first axis.

    Args:
        source: the examples.
        layout: which rows this pipeline feeds to which replicas.
        seed: the run's seed.
        start: the global step of the first batch.
        size: how many per-replica batches one call of the sampler and of the source draws.
    """
    batch, local = layout.global_batch_size, layout.local_replicas
    elements = tf.range(size, dtype=tf.int64)[:, tf.newaxis]
    offsets = tf.range(layout.rows, dtype=tf.int64)[tf.newaxis, :]
    span = (1 + (size + local - 2) // local) * batch

    def draw(index: tf.Tensor) -> tuple[Any, tf.Tensor | None]:
        element = index * size + elements
        step, replica = start + element // local, layout.first_replica + element % local
        rows = replica * layout.rows + offsets
        positions = tf.reshape(step * batch + tf.minimum(rows, batch - 1), [-1])
        indexes = sampler.shuffled(positions, count=len(source), seed=seed, span=span)
        examples = tf.nest.map_structure(fold, source.gather(indexes))
        return examples, None if layout.even else tf.cast(rows < batch, tf.float32)

    def fold(values: tf.Tensor) -> tf.Tensor:
        folded = tf.reshape(values, tf.concat([[size, layout.rows], tf.shape(values)[1:]], axis=0))
        return tf.ensure_shape(folded, [size, layout.rows, *values.shape[1:]])

    # A call a core, unless calls are so large that two fill the memory's bandwidth.
    calls = tf.data.AUTOTUNE if size <= MOST_AT_ONCE else 2
    return tf.data.Dataset.counter().map(draw, num_parallel_calls=calls, deterministic=True)


def at_once(source: Source, layout: Layout) -> int:
    """How many per-replica batches to draw in one call: several where examples are in memory.

    A person's own source may decode images: it gets a batch a call, so that calls run in parallel.
    """
    if not isinstance(source, Arrays | Indexes):
        return 1
    return max(1, min(MOST_AT_ONCE, BYTES_AT_ONCE // max(1, source.row_bytes * layout.rows)))


def _eval_source(source: Source, layout: Layout) -> tf.data.Dataset:
    offsets = tf.range(layout.rows, dtype=tf.int64)
    batch, local = layout.global_batch_size, layout.local_replicas
    count = len(source)

    def element(index: tf.Tensor) -> tuple[Any, tf.Tensor | None]:
        step, replica = index // local, layout.first_replica + index % local
        positions = step * batch + replica * layout.rows + offsets
        end = tf.minimum((step + 1) * batch, count)
        examples = source.gather(tf.minimum(positions, end - 1))
        return examples, tf.cast(positions < end, tf.float32)

    counter = tf.data.Dataset.counter()
    return counter.map(element, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


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
    return data.dataset if isinstance(data, GlobalBatches | PerReplica) else data


def _examples(data: Any) -> tf.data.Dataset:
    if not isinstance(data, tf.data.Dataset):
        raise TypeError(f"A {type(data).__name__} cannot be split by rows.")
    return data


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
