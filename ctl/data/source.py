"""The kinds of data that a trainer's `build_dataset` may return."""

import abc
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from ctl import errors
from ctl.data import sampler
from ctl.data.features import flatten_features, map_features
from ctl.errors import UsageError

Batch: TypeAlias = dict[str, Any]  # name -> tensor; `label` may be a dict of tensors
Nest: TypeAlias = Any  # any structure of tensors that tf.nest accepts; TensorFlow has no type hints
Augment: TypeAlias = Callable[[Batch, tf.Tensor], Batch]  # (example, [2] int64 seed) -> example


class MaskedBatch(NamedTuple):
    """One replica's rows of a global batch, as an input pipeline yields them.

    It has a type of its own, to distinguish it from a user's `(x, label)`.

    Attributes:
        batch: [rows, ...] tensors.
        row_mask: [rows] float32, 1 for a row that exists and 0 for padding; None if all rows exist.
    """

    batch: Batch
    row_mask: tf.Tensor | None

    def __getitem__(self, key: Any) -> Any:
        """Returns a feature by its name, as from a dict, in a loop of the user; padding included."""
        return self.batch[key] if isinstance(key, str) else tuple.__getitem__(self, key)


@functools.lru_cache(maxsize=4)  # a type holds the data that it reads
def described_batch(description: str) -> Any:
    """Returns a type of batches for `ctl.Step`, which has the description of their data.

    Its `read` is a function of a step that reads its global batch again, and returns it with the indexes
    of the examples.
    """
    return type("DescribedBatch", (MaskedBatch,), {"description": description, "read": None})


class Source(abc.ABC):
    """Examples that can be read by their index, in any order.

        class Squares(ctl.data.Source):
            def __len__(self):
                return 1000
            def gather(self, indexes):
                return {"x": indexes, "label": indexes ** 2}

    ctl decides which indexes form a batch (one seeded permutation per epoch). So a run can start at
    any step without reading the examples before it, and the global batches do not depend on the
    number of replicas.

    Attributes:
        row_bytes: approximate bytes that are read for one example; several batches are then read
            in one call of `gather`. None if it is not known, or if reading an example is expensive.
        lengths: [examples] the lengths of sequences, for `ctl.data.packed` and `ctl.data.bucketed`;
            None if every example must be read to find them.
        files: the files that the examples come from; `data.cache` in a folder is valid for their sizes
            and modification times, and a run resumes with files of the same names and sizes.
        version: names what `gather`, or `read` and `parse`, make of the files. `data.cache` in a folder
            requires it, and reads and parses again if it has changed.
        record_offsets: where in the files the records are; a run resumes with the same ones.
        inner_sources: the sources that this one reads.
        has_one_shape: whether the batches of all steps have the same shape.
    """

    row_bytes: float | None = None
    lengths: np.ndarray | None = None
    files: Sequence[str] = ()
    version: str | None = None
    record_offsets: np.ndarray | None = None
    inner_sources: Sequence["Source"] = ()
    has_one_shape = True

    @property
    def has_own_order(self) -> bool:
        """Whether the source decides by itself which examples form a batch."""
        return type(self).training_order is not Source.training_order

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of examples."""

    @abc.abstractmethod
    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads examples, using TensorFlow ops.

        Args:
            indexes: [rows] int64, each in [0, len(self)).

        Returns:
            A batch: a dict of tensors of shape [rows, ...], row i for index i.
        """

    def training_order(
        self, positions: tf.Tensor, *, batch_size: int, seed: int, span: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns which examples are at positions of the endless training stream.

        Position p is row p mod B of step p div B, for global batches of B rows. By default the order is
        one seeded permutation per epoch. A source that reads another source passes the call on to it.

        Args:
            positions: [rows] int64; the first must be the smallest.
            batch_size: B.
            seed: the run's seed.
            span: static upper bound of the difference to the first position, exclusive.

        Returns:
            [rows] int64 indexes for `gather`, and [rows, 2] int64 seeds for random augmentation.
        """
        order = {"count": len(self), "seed": seed, "span": span}
        indexes = self.order(positions, seed=seed, span=span)
        return indexes, sampler.augmentation_seeds(positions, indexes, **order)

    def order(self, positions: tf.Tensor, *, seed: int, span: int) -> tf.Tensor:
        """Returns the indexes of `training_order`; every epoch must be a permutation of all examples."""
        return sampler.example_indexes(positions, count=len(self), seed=seed, span=span)

    def evaluation_order(self, positions: tf.Tensor, *, batch_size: int) -> tf.Tensor:
        """Returns the indexes for `gather` of the rows of an evaluation; the positions by default.

        Args:
            positions: [rows] int64, each in [0, len(self)), of one global batch.
            batch_size: the number of rows of a full global batch.
        """
        return positions

    def count_examples(self, positions: int, *, seed: int) -> dict[str, dict[str, float]]:
        """Counts the examples that each of several sources gives to the training stream.

        Args:
            positions: the number of rows, steps x global batch size.
            seed: the run's seed.

        Returns:
            name -> {"examples": number of rows, "epochs": the same in epochs of the source}; {} for
            examples that are not mixed.
        """
        return {}

    def without_python(self) -> "Source":
        """Returns a source of the same examples that reads them by TensorFlow ops alone.

        It is used for input pipelines on remote hosts, where this program does not run.
        """
        return self


class RowSource(Source):
    """Examples that are read many at a time, and then parsed one by one, in parallel.

        class Photos(ctl.data.RowSource):
            def __len__(self):
                return len(self.paths)
            def read(self, indexes):
                return tf.gather(self.paths, indexes)
            def parse(self, row):
                return {"image": tf.io.decode_jpeg(tf.io.read_file(row), channels=3)}

    Examples of different shapes are possible, if an augmentation crops them to one shape.
    """

    @abc.abstractmethod
    def read(self, indexes: tf.Tensor) -> Any:
        """Reads what `parse` takes, using TensorFlow ops.

        Args:
            indexes: [rows] int64, each in [0, len(self)).

        Returns:
            A tensor of shape [rows, ...], or a structure of such tensors.
        """

    @abc.abstractmethod
    def parse(self, row: Any) -> Batch:
        """Makes an example, a dict of tensors, from one row of `read`, using TensorFlow ops."""

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads and parses examples."""
        # In a tuple, so that a row that is a tuple itself is one argument of `parse`.
        rows = tf.data.Dataset.from_tensors((self.read(indexes),)).unbatch()
        # get_single_element takes no more than one batch, so the batch must hold all rows.
        return rows.map(self.parse).batch(tf.size(indexes, tf.int64)).get_single_element()


class Arrays(Source):
    """Examples held in memory, one array per feature.

    Args:
        features: name -> array of shape [examples, ...], with the same number of examples each. The
            arrays are copied. Several targets are a dict of arrays, as `label`.
        device: the device whose memory holds the examples.
        files: the files that the arrays were read from.
    """

    def __init__(
        self, features: Mapping[str, Any], *, device: str = "CPU:0", files: Sequence[str] = ()
    ):
        self.files = files
        if not isinstance(features, Mapping) or not features:
            raise UsageError(
                "ctl.data.arrays requires a dict of at least one array, {name: array}."
            )
        # init_scope: arrays that are created while a tf.function is traced must outlive the trace.
        with tf.init_scope(), tf.device(device):
            self._features = map_features(_tensor, features)
        tensors = flatten_features(self._features)
        counts = {name: int(tensor.shape[0]) for name, tensor in tensors.items()}
        self._count = min(counts.values())
        # A string counts with the size of its reference.
        self.row_bytes = sum(math.prod(a.shape[1:]) * a.dtype.size for a in tensors.values())
        if len(set(counts.values())) > 1 or self._count == 0:
            raise UsageError(
                f"The arrays have {counts} examples, but each must have the same number, at least 1."
            )

    def __len__(self) -> int:
        """The number of examples."""
        return self._count

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads rows of every array."""
        return tf.nest.map_structure(lambda array: tf.gather(array, indexes), self._features)

    def copy_to_device(self, device: str) -> "Arrays":
        """Returns a copy of the examples in the memory of a device, such as "GPU:0"."""
        return Arrays(self._features, device=device)


@dataclasses.dataclass(frozen=True)
class Augmented:
    """Training examples that are changed at random each time they are read.

    Attributes:
        data: a `Source`, or a dataset of single examples.
        augment: (example, [2] int64 seed) -> example.
    """

    data: Source | tf.data.Dataset
    augment: Augment


def augmented(data: Source | tf.data.Dataset, augment: Augment) -> Augmented:
    """Applies a random augmentation to training examples, reproducibly on any hardware.

        def flip(example, seed):
            image = tf.image.stateless_random_flip_left_right(example["image"], seed)
            return {**example, "image": image}

        ctl.data.augmented(ctl.data.idx("experiments/data/mnist", "train"), flip)

    The seed is a function of the run's seed, the epoch and the example. For a dataset, whose epochs
    are unknown, it is a function of the run's seed and the position in the training stream. So the
    augmentation of an example does not depend on the replica that reads it nor on how often the run
    was restarted, and it differs between epochs.

    Args:
        data: a `Source`, or a `tf.data.Dataset` of single examples.
        augment: takes an example (a dict of tensors without the batch axis) and a [2] int64 seed
            for the `tf.image.stateless_*` and `tf.random.stateless_*` functions; returns an example.
            To draw several times, split the seed with `tf.random.split(seed, n)`.

    Returns:
        A value that `build_dataset("train", ...)` may return.

    Raises:
        UsageError: `data` is of another type.
    """
    if not isinstance(data, Source | tf.data.Dataset):
        raise UsageError(
            f"ctl.data.augmented got {type(data).__name__}, but requires a ctl.data.Source or a "
            "tf.data.Dataset of single examples."
        )
    return Augmented(data, augment)


@dataclasses.dataclass(frozen=True)
class GlobalBatches:
    """A dataset whose elements are complete global batches.

        return ctl.data.GlobalBatches(tf.data.Dataset.from_tensor_slices(examples).batch(64).repeat())

    `strategy.experimental_distribute_dataset` splits each batch over the replicas.

    Attributes:
        dataset: elements are dicts of [global batch, ...] tensors.
    """

    dataset: tf.data.Dataset


@dataclasses.dataclass(frozen=True)
class PerReplica:
    """A dataset whose elements are per-replica batches.

        size = input_context.get_per_replica_batch_size(64)
        return ctl.data.PerReplica(make_dataset(input_context).batch(size))

    Consecutive elements go to consecutive replicas of this input pipeline. It is up to the author of
    the dataset that the global batches are the same on any number of replicas.

    Attributes:
        dataset: elements are dicts of [per-replica batch, ...] tensors.
    """

    dataset: tf.data.Dataset


Data: TypeAlias = Source | tf.data.Dataset | Augmented | GlobalBatches | PerReplica


def _tensor(name: str, value: Any) -> tf.Tensor:
    try:
        # convert_to_tensor may share the memory of a numpy array; identity copies it, so that the
        # user can change the array afterwards.
        tensor = tf.identity(tf.convert_to_tensor(value))
    except (TypeError, ValueError):
        raise UsageError(
            f"ctl.data.arrays cannot convert {name!r}, {errors.type_name(value)}, to a tensor: "
            "provide an array of numbers or strings whose rows have equal lengths."
        ) from None
    if tensor.shape.rank == 0:
        raise UsageError(
            f"ctl.data.arrays got a single value for {name!r}, but requires one per example."
        )
    return tensor
