"""The input pipeline of a trainer, from its `build_dataset` to the datasets its strategy iterates."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
import functools
import importlib
import json
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data import distribution, host_random
from ctl.data.kinds import Kind, kind_of
from ctl.data.layout import Layout, WorkerShard
from ctl.data.source import Arrays, Data, Nest, Source, described_batch
from ctl.errors import UsageError, name_arguments
from ctl.hardware import strategies
from ctl.private import replaced

_LOG = logging.getLogger("ctl")

BuildDataset = Callable[[str, tf.distribute.InputContext], Data]
# What an input pipeline can do without, by what it is for: "module:function" in `ctl.data`.
_LEAVES = {
    "cache": "cache:cache_data",
    "description": "description:describe",
    "errors": "data_errors:explain",
    "files": "description:describe_files",
    "remote": "python_functions:without_python",
    "unreadable": "data_errors:find_unreadable",
}


def _open(name: str) -> Callable[..., Any]:
    """Imports a function of `_LEAVES`."""
    module, function = _LEAVES[name].split(":")
    return getattr(importlib.import_module(f"ctl.data.{module}"), function)


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """What is known of the training batches before any is read.

    Attributes:
        spec: the spec of a batch with an unknown number of rows.
        full_batches: whether every global batch is known to be full.
        has_one_shape: whether all batches have one shape, unlike those of `ctl.data.bucketed`.
        supports_chunks: whether many batches can be stacked in one element.
    """

    spec: Nest
    full_batches: bool
    has_one_shape: bool
    supports_chunks: bool


@dataclasses.dataclass(eq=False)
class InputPipeline:
    """Gives each replica of a strategy its rows of each global batch; the constructor reads no data.

        pipeline = InputPipeline(trainer.build_dataset, strategy=strategy, seed=0, prefetch=-1)
        iterator = iter(pipeline.training_dataset(64, start=0))
        batch, row_mask = next(iterator)

    Args:
        build_dataset: returns the data of a split.
        strategy: the distribution strategy.
        seed: the run's seed.
        prefetch: number of global batches to prepare ahead; -1 lets tf.data choose.
        cache: where parsed examples are kept, the value of `data.cache`; "" for nowhere.
        build_scope: makes the context manager in which `build_dataset` is called.

    Attributes:
        descriptions: split -> what `description.describe` returns for it, for the same splits.
    """

    build_dataset: BuildDataset
    _: dataclasses.KW_ONLY
    strategy: tf.distribute.Strategy
    seed: int
    prefetch: int
    cache: str = ""
    build_scope: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __post_init__(self) -> None:
        # By split. Only sources, augmented or not, because a dataset must be built each time.
        self._sources: dict[str, Kind] = {}
        self._specs: dict[str, dict[str, tf.TensorSpec]] = {}
        self.descriptions: dict[str, dict[str, Any]] = {}

    def layout(self, global_batch_size: int) -> Layout:
        """Returns the layout of a global batch over all replicas of the strategy."""
        return Layout(global_batch_size, self.strategy.num_replicas_in_sync)

    def data(self, split: str, context: tf.distribute.InputContext | None = None) -> Kind:
        """Returns the data of a split for one input pipeline.

        `build_dataset` is called once for a `Source`, because every pipeline reads all of it. It is
        called each time for a dataset: a second iteration of the same dataset object that shuffles
        would continue in another order.
        """
        if split in self._sources:
            return self._sources[split]
        # Every pipeline must read all examples, since ctl selects its rows of each global batch. So
        # each gets the context of a single pipeline: a dataset that its author shards by the context,
        # as tf.distribute's guide does, would lose the examples of the other pipelines.
        replicas = self.strategy.num_replicas_in_sync
        data = self._build(split, tf.distribute.InputContext(num_replicas_in_sync=replicas))
        if data.selects_rows and context is not None:
            data = self._build(split, context)
        self._specs[split] = data.check(split)
        if split not in self.descriptions:
            self.descriptions[split] = _open("description")(data)
        if strategies.spec_of(self.strategy).remote:  # hosts that do not run this program
            data = _open("remote")(data, split)
        if data.source is not None:
            self._sources[split] = data
        return data

    def examples_per_epoch(self) -> int | None:
        """Returns the number of training examples; None if it is not known, or endless."""
        data = self.data("train")
        return None if data.in_batches else data.count

    def training_data(self, global_batch_size: int) -> TrainingData:
        """Returns what is known of the training batches, without reading any."""
        data = self.data("train")
        return TrainingData(
            spec=self.element_spec(),
            full_batches=data.has_full_batches(self.layout(global_batch_size)),
            has_one_shape=data.has_one_shape,
            supports_chunks=data.supports_chunks,
        )

    def training_source(self) -> Source | None:
        """Returns the source of the training data, without building a dataset again."""
        return self._sources["train"].source if "train" in self._sources else None

    def element_spec(self, split: str = "train") -> dict[str, tf.TensorSpec]:
        """Returns the spec of a batch of a split with an unknown number of rows."""
        if split not in self._specs:
            self.data(split)
        return self._specs[split]

    def training_dataset(self, global_batch_size: int, *, start: int, marks: bool = False) -> Any:
        """Returns the endless, distributed training dataset from a global step on.

        Args:
            global_batch_size: number of rows in a global batch.
            start: the global step of the first batch.
            marks: whether the type of the elements has the description of their data.
        """
        data = self._resumed(start)
        self._check_strategy(data)
        order: dict[str, Any] = {"seed": self.seed, "start": start}
        if data.is_split_by_strategy:
            batches = data.training(self.layout(global_batch_size), **order, prefetch=0)
            return distribution.global_batches(self.strategy, batches)

        def dataset_fn(
            context: tf.distribute.InputContext, shard: WorkerShard | None = None
        ) -> tf.data.Dataset:
            layout = Layout.from_context(context, global_batch_size)
            batches = self.data("train", context).training(
                layout, **order, prefetch=self.prefetch, shard=shard
            )
            if not marks or data.selects_rows:
                return batches
            marked = {"seed": self.seed, "global_batch_size": global_batch_size}
            # The same elements in a structure of another type.
            text = json.dumps({**self.descriptions["train"], **marked})
            kind = described_batch(text)
            kind.read = staticmethod(functools.partial(self._read, global_batch_size))
            variant = tf.data.experimental.to_variant(batches)
            return tf.data.experimental.from_variant(variant, kind(*batches.element_spec))

        if strategies.spec_of(self.strategy).coordinated:
            return distribution.per_worker(self.strategy, dataset_fn)
        return distribution.from_function(self.strategy, dataset_fn, per_worker=data.selects_rows)

    def first_batch(self, global_batch_size: int, start: int) -> Any:
        """Returns the batch of the first replica at a global step, on this process and in eager mode.

        Args:
            global_batch_size: number of rows in a global batch.
            start: the global step.

        Returns:
            An element of the training dataset.
        """
        layout = self.layout(global_batch_size)
        return self.data("train").first(layout, seed=self.seed, start=start)

    def training_chunks(
        self, global_batch_size: int, *, start: int, size: int, indexes_only: bool
    ) -> Any:
        """Returns the training data of each replica in chunks of `size` batches.

        Args:
            global_batch_size: number of rows in a global batch.
            start: the global step of the first batch.
            size: number of batches in an element, stacked along its first axis.
            indexes_only: give the indexes of the examples, as `index`, instead of the examples.
        """
        data = self._resumed(start)
        if not data.supports_chunks:
            raise UsageError(
                "runtime.xla=loop requires single examples: let build_dataset return a "
                "ctl.data.Source or a tf.data.Dataset of examples."
            )
        if indexes_only:
            data = kind_of(Arrays({"index": np.arange(len(self._training_arrays()))}))

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            layout = Layout.from_context(context, global_batch_size)
            return data.chunks(layout, seed=self.seed, start=start, size=size)

        return distribution.from_function(self.strategy, dataset_fn)

    def _read(self, global_batch_size: int, step: int) -> tuple[Any, list[int] | None]:
        layout = Layout(global_batch_size, 1)
        (batch, _) = self.data("train").first(layout, seed=self.seed, start=step)
        return batch, self.example_indexes(global_batch_size, step)

    def example_indexes(self, global_batch_size: int, step: int) -> list[int] | None:
        """Returns the indexes of the examples in a step's global batch; None for a dataset."""
        source = self.data("train").source
        if source is None:
            return None
        positions = tf.range(global_batch_size, dtype=tf.int64) + step * global_batch_size
        indexes, _ = source.training_order(
            positions, batch_size=global_batch_size, seed=self.seed, span=global_batch_size
        )
        # The indexes of a bucketed source contain the bucket, too.
        return (indexes.numpy() % len(source)).tolist()

    @contextlib.contextmanager
    def report_errors(
        self, kind: str, split: str, find_indexes: Callable[[], Iterable[int] | None]
    ) -> Iterator[None]:
        """Turns TensorFlow's errors about the examples of a split into an error of one line.

        Args:
            kind: "training" or "evaluation", for the message.
            split: the split that is read.
            find_indexes: returns the indexes of the examples that were read last; None if they are not
                known.

        Raises:
            UsageError: an example or a file is corrupt, or the examples differ in their shapes.
            Failure: a file cannot be read.
        """

        def find_unreadable() -> str:
            indexes = find_indexes()
            source = None if indexes is None else self.data(split).source
            if source is None or source.has_own_order:
                return ""
            return _open("unreadable")(source, indexes)

        def find_files() -> str:
            source = self.data(split).source
            return _open("files")(source.files) if source and source.files else ""

        try:
            yield
        except tf.errors.OpError as error:
            spec = functools.partial(self.element_spec, split)
            _open("errors")(error, kind, spec, find_unreadable, find_files)
            raise

    def copy_to_device(self, device: str) -> Arrays:
        """Returns a copy of the training examples in the memory of a device."""
        return self._training_arrays().copy_to_device(device)

    def evaluation_data(
        self, split: str, context: tf.distribute.InputContext | None = None
    ) -> Kind:
        """Returns the data of a split; training examples without their augmentation."""
        data = self.data(split, context)
        return data if data.augment is None else dataclasses.replace(data, augment=None)

    def evaluation_dataset(self, global_batch_size: int, split: str = "eval") -> Any:
        """Returns a split as a distributed dataset, endless for a `Source`; see `kinds`."""
        data = self.evaluation_data(split)
        self._check_strategy(data)
        if data.is_split_by_strategy:
            batches = data.evaluation(self.layout(global_batch_size), prefetch=0)
            return distribution.global_batches(self.strategy, batches)

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            layout = Layout.from_context(context, global_batch_size)
            return self.evaluation_data(split, context).evaluation(layout, prefetch=self.prefetch)

        if strategies.spec_of(self.strategy).coordinated:  # the coordinator evaluates by itself
            return distribution.disable_autotune(dataset_fn(tf.distribute.InputContext()))
        return distribution.from_function(self.strategy, dataset_fn, per_worker=data.selects_rows)

    def evaluation_steps(self, global_batch_size: int, split: str = "eval") -> int | None:
        """Returns the number of steps that read every example once; None if it is not known ahead."""
        return self.evaluation_data(split).steps(self.layout(global_batch_size))

    def _build(self, split: str, context: tf.distribute.InputContext) -> Kind:
        with self.build_scope(), host_random.checked_maps():
            returned = self.build_dataset(split, context)
            data = kind_of(returned, split)
            return _open("cache")(data, self.cache) if self.cache else data

    def _resumed(self, start: int) -> Kind:
        """Returns the training data; warns if a dataset is read from its beginning."""
        data = self.data("train")
        if start and data.source is None:
            _LOG.warning(
                "The training data is a tf.data.Dataset: to resume at step %d, all batches before it "
                "are read again and dropped. A ctl.data.Source would seek.",
                start,
            )
        return data

    def _check_strategy(self, data: Kind) -> None:
        """Raises UsageError for data that the strategy would not split by the global batch."""
        # With several workers, experimental_distribute_dataset shards by files or examples: which
        # examples form a global batch would depend on the number of workers.
        spec = strategies.spec_of(self.strategy)
        if (spec.multi_process and data.is_split_by_strategy) or (
            spec.coordinated and data.selects_rows
        ):
            raise UsageError(
                f"{data.name} cannot be split over several processes: let build_dataset return a "
                "ctl.data.Source or a tf.data.Dataset of examples."
            )

    def _training_arrays(self) -> Arrays:
        data = self.data("train")
        if data.augment is not None:
            raise UsageError(
                "data.placement=device reads examples on the device and bypasses the input pipeline "
                "that augments them: choose data.placement=stream."
            )
        if type(data.source) is not Arrays:  # a subclass may read other examples than it holds
            raise UsageError(
                "data.placement=device requires arrays that fit on the device: let build_dataset "
                "return ctl.data.arrays or ctl.data.idx, or choose data.placement=stream."
            )
        return data.source


def distribute(
    data: Data, global_batch_size: int, strategy: tf.distribute.Strategy | None = None,
    *, start_step: int = 0, seed: int = 0, prefetch: int = -1,
) -> Any:  # fmt: skip
    """Returns endless training data for a loop of your own, in the order of a `StandardTrainer`.

    The order is a function of the seed and the step, so a resumed run needs only the number of its
    step:

        start = step.global_step.numpy()
        for batch in ctl.data.distribute(source, 64, strategy, start_step=start):
            step(batch)

    Args:
        data: a `ctl.data.Source`, which is shuffled in each epoch; a `tf.data.Dataset` of single
            examples, in the same order in every run; `ctl.data.augmented(...)` of one of them;
            `ctl.data.GlobalBatches`, or `ctl.data.PerReplica`.
        global_batch_size: examples per step, over all replicas.
        strategy: the strategy whose replicas get the rows; the current strategy by default.
        start_step: the step of the first batch.
        seed: the seed of the order.
        prefetch: the number of global batches to prepare ahead; -1 lets tf.data choose.

    Returns:
        A distributed dataset, for `ctl.Step`. If the replicas do not divide a batch, the last rows are
        padding, and an element holds a mask. `element["label"]` is a feature, with the padding.

    Raises:
        UsageError: the data cannot be divided in this way.
    """
    if start_step < 0:
        raise UsageError(f"start_step is {start_step}, but must be at least 0.")
    replaced.apply()
    strategy = strategy or tf.distribute.get_strategy()
    pipeline = InputPipeline(
        lambda split, context: data, strategy=strategy, seed=seed, prefetch=prefetch
    )
    with name_arguments():
        dataset = pipeline.training_dataset(global_batch_size, start=start_step, marks=True)

    def report(number: int) -> contextlib.AbstractContextManager[None]:
        step = start_step + number
        find_indexes = functools.partial(pipeline.example_indexes, global_batch_size, step)
        return pipeline.report_errors("training", "train", find_indexes)

    return distribution.explain_errors(dataset, report)
