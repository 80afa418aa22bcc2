"""The kinds of data that `build_dataset` may return; each knows how it becomes per-replica batches.

An element is a `MaskedBatch`, `(batch, row_mask)`: one replica's rows of a global batch, and a [rows]
float32 mask of the rows that exist. Replica r holds the rows [r b, (r + 1) b) of a global batch of B
rows, where b = ceil(B / replicas). Rows past the end of the global batch are padding, masked by 0.
Padding repeats the last row of the same global batch: zeros, or rows of another batch, might produce a
NaN. The mask is None if every row always exists, that is, in training if the replicas divide B.

Consecutive elements go to consecutive replicas of an input pipeline. So the rows and their order are
the same on any number of replicas and input pipelines.
"""

import abc
from collections.abc import Iterator
import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data import batching, elements, sampler
from ctl.data.autograph import convert
from ctl.data.distribution import disable_autotune
from ctl.data.layout import Layout, WorkerShard
from ctl.data.source import (
    Arrays,
    Augment,
    Augmented,
    GlobalBatches,
    MaskedBatch,
    Nest,
    PerReplica,
    Source,
)
from ctl.errors import UsageError, type_name


@dataclasses.dataclass(frozen=True)
class Kind(abc.ABC):
    """Data of one split.

    Attributes:
        source: the examples; None for a dataset.
        dataset: the dataset; None for a source.
        augment: changes the examples of training; None if they are not augmented.
        in_batches: whether the elements are batches of the user, not examples.
        selects_rows: whether the user selects the rows of each input pipeline.
        is_split_by_strategy: whether the elements are global batches, which the strategy splits.
    """

    source: Source | None = None
    dataset: Any = None
    augment: Augment | None = None
    in_batches = False
    selects_rows = False
    is_split_by_strategy = False

    @property
    def name(self) -> str:
        """The class of the source or the dataset, for messages."""
        return type(self.dataset if self.source is None else self.source).__name__

    @property
    def has_one_shape(self) -> bool:
        """Whether all training batches have one shape, unlike those of `ctl.data.bucketed`."""
        return self.source is None or self.source.has_one_shape

    @property
    def supports_chunks(self) -> bool:
        """Whether `chunks` can stack the training batches."""
        return self.has_one_shape and not self.in_batches

    @property
    def count(self) -> int | None:
        """The number of elements; None if there is no end, or if it is not known."""
        count = int(self.dataset.cardinality())
        return count if count >= 0 else None

    def check(self, split: str) -> dict[str, tf.TensorSpec]:
        """Returns the spec of a batch, as `spec` does.

        Raises:
            UsageError: `build_dataset` may not return this data for this split.
        """
        if self.augment is not None and split != "train":
            raise UsageError(
                f"build_dataset({split!r}, ...) returned augmented examples: return them unchanged."
            )
        if self.count == 0:
            raise UsageError(
                f"build_dataset({split!r}, ...) returned an empty dataset: at least one example is "
                "required."
            )
        return self.spec()

    def has_full_batches(self, layout: Layout) -> bool:
        """Returns whether all training batches are known to be full, without reading any."""
        return True  # ctl batches the endless examples

    def spec(self) -> dict[str, tf.TensorSpec]:
        """Returns the spec of a batch with an unknown number of rows.

        Raises:
            UsageError: the elements are not dicts of dense tensors of known rank.
        """
        spec = elements.batch_spec(self.dataset.element_spec, is_batched=self.in_batches)
        return spec if self.augment is None else elements.augmented_spec(self.augment, spec)

    def training(
        self, layout: Layout,
        *, seed: int, start: int, prefetch: int = 1, shard: WorkerShard | None = None,
    ) -> tf.data.Dataset:  # fmt: skip
        """Returns the endless training stream of one input pipeline, from a global step on.

        A `tf.data.Dataset` that shuffles must be a new object each time: a second iteration of the same
        object continues in another order.

        Args:
            layout: which rows this pipeline feeds to which replicas.
            seed: the run's seed.
            start: the global step of the first batch.
            prefetch: number of global batches to prepare ahead; 0 for none, -1 lets tf.data choose.
            shard: the batches of one worker; None for all batches.

        Returns:
            A dataset of `MaskedBatch`es, or of the batches of the user.
        """
        return _prefetched(self._training(layout, seed, start, shard), layout, prefetch)

    @abc.abstractmethod
    def _training(
        self, layout: Layout, seed: int, start: int, shard: WorkerShard | None
    ) -> tf.data.Dataset: ...

    def evaluation(self, layout: Layout, *, prefetch: int = 1) -> tf.data.Dataset:
        """Returns the evaluation stream of one input pipeline: every example once, in order.

        Args:
            layout: which rows this pipeline feeds to which replicas.
            prefetch: as for `training`.

        Returns:
            A dataset as for `training`. That of a source repeats endlessly: each pass has `steps` steps.
        """
        return _prefetched(self._evaluation(layout), layout, prefetch)

    @abc.abstractmethod
    def _evaluation(self, layout: Layout) -> tf.data.Dataset: ...

    def steps(self, layout: Layout) -> int | None:
        """Returns the number of steps that read every example once; None if it is not known ahead."""
        if self.dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise UsageError("The evaluation dataset never ends: return one without repeat().")
        return None  # batches may have any size

    def first(self, layout: Layout, *, seed: int, start: int) -> Any:
        """Returns the batch of the first replica at a global step."""
        return next(iter(disable_autotune(self.training(layout, seed=seed, start=start))))

    def chunks(self, layout: Layout, *, seed: int, start: int, size: int) -> tf.data.Dataset:
        """Like `training`, with `size` batches of a replica stacked; the replicas come in turn."""
        count = layout.local_replicas
        batches = self.training(layout, seed=seed, start=start, prefetch=2)

        def by_replica(values: tf.Tensor | None) -> tf.Tensor | None:
            if values is None:
                return None
            values = tf.reshape(values, [size, count, *values.shape[1:]])
            return tf.transpose(values, [1, 0, *range(2, values.shape.rank)])

        chunks = batches.batch(size * count, drop_remainder=True)
        if count > 1:  # the batches of the replicas come in turn
            chunks = chunks.map(lambda all: tf.nest.map_structure(by_replica, all)).unbatch()
        return chunks.prefetch(count)


class SourceKind(Kind):
    """A source of single examples, augmented or not."""

    source: Source

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(self.source)

    def spec(self) -> dict[str, tf.TensorSpec]:
        """Returns the spec of a batch; traces `gather` without reading any example."""
        spec = elements.source_spec(self.source)
        return spec if self.augment is None else elements.augmented_spec(self.augment, spec)

    def _training(
        self, layout: Layout, seed: int, start: int, shard: WorkerShard | None
    ) -> tf.data.Dataset:
        size = batching.batches_per_call(self.source, layout)
        read = batching.training_reader(
            self.source, layout, seed=seed, start=start, size=size, shard=shard
        )
        return batching.source_batches(read, self.source, self.augment, layout, size=size)

    def _evaluation(self, layout: Layout) -> tf.data.Dataset:
        read = batching.evaluation_reader(self.source, layout)
        return batching.source_batches(read, self.source, None, layout, size=1)

    def steps(self, layout: Layout) -> int:
        """Returns the number of steps that read every example once."""
        return math.ceil(len(self.source) / layout.global_batch_size)

    def chunks(self, layout: Layout, *, seed: int, start: int, size: int) -> tf.data.Dataset:
        """Stacks `size` batches of each replica; arrays are read in one call."""
        if not isinstance(self.source, Arrays) or self.augment is not None:
            return super().chunks(layout, seed=seed, start=start, size=size)

        def read(replica: int) -> tf.data.Dataset:
            own = dataclasses.replace(layout, pipelines=layout.replicas, pipeline=replica)
            reader = batching.training_reader(
                self.source, own, seed=seed, start=start, size=size, shard=None
            )
            return batching.array_batches(reader, [size, layout.rows_per_replica])

        first, count = layout.first_replica, layout.local_replicas
        chunks = [read(replica) for replica in range(first, first + count)]
        turns = tf.data.Dataset.range(count).repeat()
        in_turn = tf.data.Dataset.choose_from_datasets(chunks, turns) if count > 1 else chunks[0]
        # One chunk ahead is enough: it holds many batches.
        return in_turn.prefetch(count)


class DatasetKind(Kind):
    """A `tf.data.Dataset` of single examples, augmented or not."""

    def check(self, split: str) -> dict[str, tf.TensorSpec]:
        """Returns the spec of a batch; raises UsageError also for a dataset of batches."""
        spec = super().check(split)
        elements.check_single_examples(self.dataset)
        return spec

    def _training(
        self, layout: Layout, seed: int, start: int, shard: WorkerShard | None
    ) -> tf.data.Dataset:
        batch_size = layout.global_batch_size
        examples = _repeat(self.dataset, start, batch_size)
        if self.augment is not None:
            examples = self._augmented(examples, start * batch_size, seed)
        # Every input pipeline forms the complete global batches and keeps its rows of them, so the
        # batches do not depend on the number of pipelines. The examples are endless:
        # drop_remainder only makes the shape static.
        batches = examples.batch(batch_size, drop_remainder=True)
        if shard is not None:
            batches = batches.shard(shard.num_workers, shard.index)
        return _split(batches, layout, always_full=True)

    def _augmented(self, examples: Any, position: int, seed: int) -> tf.data.Dataset:
        """Augments examples; `position` is the place of the first one in the training stream."""
        function: Any = self.augment

        def augment(position: tf.Tensor, example: Any) -> Any:
            return convert(function)(example, sampler.position_seed(position, seed=seed))

        # The positions of a resumed run continue those of the interrupted one. The skipped examples are
        # read again, but not augmented.
        return examples.enumerate(start=position).map(augment, **batching.PARALLEL)

    def _evaluation(self, layout: Layout) -> tf.data.Dataset:
        full = self.count is not None and self.count % layout.global_batch_size == 0
        batches = self.dataset.batch(layout.global_batch_size, drop_remainder=full)
        return _split(batches, layout, always_full=full)

    def steps(self, layout: Layout) -> int | None:
        """Returns the number of steps that read every example once; None if it is not known."""
        super().steps(layout)
        return None if self.count is None else math.ceil(self.count / layout.global_batch_size)


class PerReplicaKind(Kind):
    """The user's per-replica batches."""

    in_batches = selects_rows = True
    name = "PerReplica"

    def has_full_batches(self, layout: Layout) -> bool:
        """Returns whether all training batches are known to be full."""
        rows = layout.global_batch_size // self._per_step(layout.replicas)
        # A batch that may be partial, without drop_remainder, has an unknown static size.
        return all(spec.shape[0] == rows for spec in tf.nest.flatten(self.dataset.element_spec))

    def _per_step(self, replicas: int) -> int:
        """Returns how many elements of the dataset these replicas read in a step."""
        return replicas

    def _training(
        self, layout: Layout, seed: int, start: int, shard: WorkerShard | None
    ) -> tf.data.Dataset:
        return _repeat(self.dataset, start, self._per_step(layout.local_replicas))

    def _evaluation(self, layout: Layout) -> tf.data.Dataset:
        # tf.distribute drops the last batches if their shapes are static, because it cannot give a
        # replica an empty batch then.
        rest = max(0, int(self.dataset.cardinality())) % layout.local_replicas
        specs = tf.nest.flatten(self.dataset.element_spec)
        if rest and all(spec.shape.is_fully_defined() for spec in specs):
            raise UsageError(
                f"The evaluation data ends with {rest} batches for {layout.local_replicas} replicas, "
                "which would be dropped: batch it without drop_remainder, or add batches."
            )
        return self.dataset


class GlobalBatchesKind(PerReplicaKind):
    """The user's global batches, which the strategy splits over the replicas."""

    selects_rows = False
    is_split_by_strategy = True
    name = "GlobalBatches"

    def _per_step(self, replicas: int) -> int:
        return 1

    def _evaluation(self, layout: Layout) -> tf.data.Dataset:
        return self.dataset

    def first(self, layout: Layout, *, seed: int, start: int) -> Any:
        """Returns the rows of the first replica in the first batch, without skipping any."""
        batch = next(iter(disable_autotune(self.dataset)))
        return tf.nest.map_structure(lambda values: values[: layout.rows_per_replica], batch)


def kind_of(data: Any, split: str = "train") -> Kind:
    """Returns data that `build_dataset` returned for a split, with named features, as its kind.

    Raises:
        UsageError: it is no data, or its features cannot be named.
    """
    examples, augment = (data.data, data.augment) if isinstance(data, Augmented) else (data, None)
    if isinstance(examples, Source):
        return SourceKind(source=examples, augment=augment)
    if isinstance(examples, tf.data.Dataset):
        return DatasetKind(dataset=elements.name_elements(examples), augment=augment)
    if isinstance(data, GlobalBatches):
        return GlobalBatchesKind(dataset=elements.name_elements(data.dataset))
    if isinstance(data, PerReplica):
        return PerReplicaKind(dataset=elements.name_elements(data.dataset))
    raise UsageError(
        f"build_dataset({split!r}, ...) returned {type_name(data)}, but must return a "
        "ctl.data.Source, a tf.data.Dataset of examples, ctl.data.augmented(...), "
        f"ctl.data.GlobalBatches or ctl.data.PerReplica{_suggest_source(data)}"
        f"{'.' if split == 'train' else f', or remove {split} from eval.splits.'}"
    )


def _suggest_source(data: Any) -> str:
    """Names the function that makes a source of data of a common type, for a message."""
    if isinstance(data, Iterator):
        return ", such as ctl.data.generator(function)"
    if isinstance(data, dict | np.ndarray) or hasattr(data, "iloc"):
        return ", such as ctl.data.arrays(...)"
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):  # such as a Sequence of Keras
        return ", such as ctl.data.random_access(data), where data[i] is one example, not a batch"
    return ""


def _split(batches: tf.data.Dataset, layout: Layout, *, always_full: bool) -> tf.data.Dataset:
    """Splits global batches into one element `(batch, row_mask)` per local replica."""
    # The batch is used as it is: the gather below would copy it.
    if always_full and layout.replicas == 1:
        return batches.map(lambda batch: MaskedBatch(batch, None))
    count = layout.rows_per_replica
    replicas = tf.range(layout.first_replica, layout.first_replica + layout.local_replicas)
    rows = replicas[:, tf.newaxis] * count + tf.range(count)[tf.newaxis, :]

    def split(batch: Nest) -> MaskedBatch:
        # The last batch of an evaluation may be partial: its size is known only here.
        size = tf.shape(tf.nest.flatten(batch)[0])[0]
        padded = tf.nest.map_structure(lambda x: tf.gather(x, tf.minimum(rows, size - 1)), batch)
        row_mask = None if always_full and layout.even else tf.cast(rows < size, tf.float32)
        return MaskedBatch(padded, row_mask)

    return batches.map(split, **batching.PARALLEL).unbatch()


def _prefetched(dataset: tf.data.Dataset, layout: Layout, prefetch: int) -> tf.data.Dataset:
    """Prefetches global batches; each has one element per local replica."""
    if not prefetch:
        return dataset
    return dataset.prefetch(prefetch if prefetch < 0 else prefetch * layout.local_replicas)


def _repeat(dataset: tf.data.Dataset, start: int, elements_per_step: int) -> tf.data.Dataset:
    """Repeats a dataset endlessly and skips the elements of the first `start` steps."""
    # repeat() comes first: `start` may lie in any epoch, and the number of examples may be unknown.
    return dataset.repeat().skip(start * elements_per_step)
