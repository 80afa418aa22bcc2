"""A trainer's `build_dataset` -> what its strategy iterates over."""

from collections.abc import Callable
import contextlib
from typing import Any

import tensorflow as tf

from ctl.data import batching, distribution, sampler
from ctl.data.augmentation import Augmented
from ctl.data.layout import Layout, WorkerShard
from ctl.data.source import Arrays, GlobalBatches, Indexes, PerReplica
from ctl.errors import UsageError
from ctl.hardware import coordinator

BuildDataset = Callable[[str, tf.distribute.InputContext], batching.Data]


class InputPipeline:
    """Feeds the replicas of a strategy with their rows of each global batch.

    feed = Feed(trainer.build_dataset, strategy=strategy, seed=0, prefetch=-1)
    iterator = iter(feed.training(64, start=0))
    batch, present = next(iterator)

    Attributes:
        kinds: split -> the class of what `build_dataset` returned, as far as it was asked.
    """

    def __init__(
        self,
        build_dataset: BuildDataset,
        *,
        strategy: tf.distribute.Strategy,
        seed: int,
        prefetch: int,
        building: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        """Takes what to feed and where to.

        Args:
            build_dataset: makes the data of a split.
            strategy: where the replicas are.
            seed: the run's seed.
            prefetch: batches to prepare ahead; -1 lets tf.data choose.
            building: what to make the data inside of.
        """
        self._build_dataset = build_dataset
        self._strategy = strategy
        self._seed = seed
        self._prefetch = prefetch
        self._building = building
        self._sources: dict[str, batching.Data] = {}
        self.kinds: dict[str, str] = {}

    def layout(self, global_batch_size: int) -> Layout:
        """How a global batch falls to the replicas."""
        return Layout(global_batch_size, self._strategy.num_replicas_in_sync)

    def data(self, split: str, context: tf.distribute.InputContext | None = None) -> batching.Data:
        """What `build_dataset` returns for a split and an input pipeline.

        A `Source` is made once, since every pipeline reads all of it. A dataset is made anew each
        time: iterated again, one that shuffles would go on in another order.
        """
        if split in self._sources:
            return self._sources[split]
        replicas = self._strategy.num_replicas_in_sync
        with self._building():
            data = self._build_dataset(
                split, context or tf.distribute.InputContext(num_replicas_in_sync=replicas)
            )
        batching.check_data(data, split)
        self.kinds[split] = type(data).__name__
        if batching.source_of(data) is not None:
            self._sources[split] = data
        return data

    def always_full(self, global_batch_size: int) -> bool:
        """Whether every training batch has all its rows, as known before the first one."""
        data = self.data("train")
        if not isinstance(data, GlobalBatches | PerReplica):
            return True
        whole = global_batch_size
        if isinstance(data, PerReplica):
            whole //= self._strategy.num_replicas_in_sync
        return all(s.shape[0] == whole for s in tf.nest.flatten(data.dataset.element_spec))

    def in_chunks(self) -> bool:
        """Whether `chunks` can give the training data."""
        return not isinstance(self.data("train"), GlobalBatches | PerReplica)

    def spec(self) -> dict[str, tf.TensorSpec]:
        """The spec of a training batch of any number of rows."""
        return batching.element_spec(self.data("train"))

    def training(self, global_batch_size: int, *, start: int) -> Any:
        """The endless training data from a global step on, distributed.

        Args:
            global_batch_size: rows of a batch.
            start: the global step of the first batch.
        """
        data = self.data("train")
        self._check_together(data)
        if isinstance(data, GlobalBatches):
            batches = batching.global_batches(data, start=start, endless=True)
            return distribution.global_batches(self._strategy, batches)

        def dataset_fn(
            context: tf.distribute.InputContext, turns: WorkerShard | None = None
        ) -> tf.data.Dataset:
            return batching.training(
                self.data("train", context),
                Layout.of(context, global_batch_size),
                seed=self._seed,
                start=start,
                prefetch=self._prefetch,
                turns=turns,
            )

        if coordinator.is_coordinated(self._strategy):
            return distribution.per_worker(self._strategy, dataset_fn)
        return self._distributed(data, dataset_fn)

    def chunks(self, global_batch_size: int, *, start: int, size: int, indexes: bool) -> Any:
        """As `training`, for one replica, `size` whole batches at a time.

        Args:
            global_batch_size: rows of a batch.
            start: the global step of the first batch.
            size: batches of an element, on its first axis.
            indexes: give the examples' indexes, as `index`, in place of the examples.
        """
        data = self.data("train")
        if not self.in_chunks():
            raise UsageError("runtime.xla=loop wants a Source or a Dataset of examples: give one.")
        if indexes:
            data = Indexes(len(self._arrays()))

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            layout = Layout.of(context, global_batch_size)
            return batching.training_chunks(data, layout, seed=self._seed, start=start, size=size)

        return distribution.from_function(self._strategy, dataset_fn)

    def indexes(self, global_batch_size: int, step: int) -> list[int] | None:
        """The examples of a step's global batch, of a `Source`; None of data without numbers."""
        source = batching.source_of(self.data("train"))
        if source is None:
            return None
        positions = tf.range(global_batch_size, dtype=tf.int64) + step * global_batch_size
        found = sampler.shuffled(
            positions, count=len(source), seed=self._seed, span=global_batch_size
        )
        return found.numpy().tolist()

    def resident(self, device: str) -> Arrays:
        """The training examples in a device's memory."""
        return self._arrays().resident(device)

    def evaluation(self, global_batch_size: int) -> Any:
        """The evaluation data, distributed; a `Source`'s goes on with absent rows after its end."""
        data = self.data("eval")
        self._check_together(data)
        if isinstance(data, GlobalBatches):
            batches = batching.global_batches(data, start=0, endless=False)
            return distribution.global_batches(self._strategy, batches)

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return batching.evaluation(
                self.data("eval", context),
                Layout.of(context, global_batch_size),
                prefetch=self._prefetch,
            )

        if coordinator.is_coordinated(self._strategy):
            return distribution.disable_autotune(dataset_fn(tf.distribute.InputContext()))
        return self._distributed(data, dataset_fn)

    def evaluation_steps(self, global_batch_size: int) -> int | None:
        """How many steps see every example once, or None where only the data's end will tell."""
        return batching.evaluation_steps(self.data("eval"), self.layout(global_batch_size))

    def _check_together(self, data: batching.Data) -> None:
        """Refuses data that this strategy would not split by the global batch."""
        coordinated = coordinator.is_coordinated(self._strategy)
        several = isinstance(self._strategy, tf.distribute.MultiWorkerMirroredStrategy)
        ready = isinstance(data, GlobalBatches)
        if (ready and several) or (coordinated and (ready or isinstance(data, PerReplica))):
            raise UsageError(
                f"{type(data).__name__} cannot be shared out among several processes: let "
                "build_dataset return a ctl.data.Source or a tf.data.Dataset of examples."
            )

    def _arrays(self) -> Arrays:
        data = self.data("train")
        if isinstance(data, Arrays):
            return data
        if isinstance(data, Augmented):
            raise UsageError(
                "data.placement=device reads examples on the device, past the input pipeline that "
                "augments them: choose data.placement=stream."
            )
        raise UsageError(
            "data.placement=device wants arrays that fit on the device: let build_dataset return "
            "ctl.data.arrays or ctl.data.idx, or choose data.placement=stream."
        )

    def _distributed(self, data: batching.Data, dataset_fn: distribution.DatasetFn) -> Any:
        per_worker = isinstance(data, PerReplica)
        return distribution.from_function(self._strategy, dataset_fn, per_worker=per_worker)
