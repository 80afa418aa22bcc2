"""What a trainer's `build_dataset` may return beside a plain `tf.data.Dataset` of examples."""

import abc
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError

Batch = dict[str, tf.Tensor]


class Source(abc.ABC):
    """Examples that can be read by their index, in any order.

        class Squares(ctl.data.Source):
            def __len__(self):
                return 1000
            def gather(self, indexes):
                return {"x": indexes, "label": indexes ** 2}

    ctl decides which indexes make a batch (a seeded permutation an epoch), so that a run can start
    at any step at once and every split into replicas sees the same batches.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many examples there are."""

    @abc.abstractmethod
    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads examples, in TensorFlow ops.

        Args:
            indexes: [rows] int64, each in [0, len(self)).

        Returns:
            A batch: a dict of tensors of shape [rows, ...], row i for index i.
        """


class Arrays(Source):
    """Examples held in memory, an array a feature."""

    def __init__(self, features: Mapping[str, np.ndarray | tf.Tensor], *, device: str = "CPU:0"):
        """Wraps arrays.

        Args:
            features: name -> array of shape [examples, ...], all with the same number of examples.
            device: whose memory holds them.
        """
        if not isinstance(features, Mapping) or not features:
            raise UsageError("ctl.data.arrays wants a dict of at least one array, name -> array.")
        with tf.init_scope(), tf.device(device):
            self._features = {name: _tensor(name, value) for name, value in features.items()}
        counts = {name: int(tensor.shape[0]) for name, tensor in self._features.items()}
        self._count = min(counts.values())
        if len(set(counts.values())) > 1 or self._count == 0:
            raise UsageError(
                f"The arrays have {counts} examples: want the same number, at least one, in each."
            )

    def __len__(self) -> int:
        """How many examples there are."""
        return self._count

    @property
    def row_bytes(self) -> int:
        """The memory of an example; of a string, that of its reference."""
        return sum(math.prod(a.shape[1:]) * a.dtype.size for a in self._features.values())

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads rows of every array."""
        return {name: tf.gather(array, indexes) for name, array in self._features.items()}

    def resident(self, device: str) -> "Arrays":
        """The same examples, held in a device's memory.

        Args:
            device: such as "GPU:0".
        """
        return Arrays(self._features, device=device)


def _tensor(name: str, value: Any) -> tf.Tensor:
    try:
        tensor = tf.identity(tf.convert_to_tensor(value))
    except (TypeError, ValueError):
        raise UsageError(
            f"ctl.data.arrays cannot make a tensor of {name!r}, a {type(value).__name__}: want an "
            "array of numbers or strings, rows of one length."
        ) from None
    if tensor.shape.rank == 0:
        raise UsageError(f"ctl.data.arrays got one value as {name!r}: want one for each example.")
    return tensor


class Indexes(Source):
    """The indexes of another source's examples, for who reads them elsewhere."""

    def __init__(self, count: int):
        """Takes how many examples the other source has."""
        self._count = count
        self.row_bytes = tf.int64.size

    def __len__(self) -> int:
        """How many examples there are."""
        return self._count

    def gather(self, indexes: tf.Tensor) -> Batch:
        """The indexes themselves, as `index`."""
        return {"index": indexes}


def arrays(features: Mapping[str, np.ndarray | tf.Tensor]) -> Arrays:
    """Examples held in memory.

        ctl.data.arrays({"x": np.random.rand(100, 4), "label": np.arange(100) % 3})

    Args:
        features: name -> array of shape [examples, ...].

    Returns:
        A `Source`.
    """
    return Arrays(features)


@dataclasses.dataclass(frozen=True)
class GlobalBatches:
    """A dataset whose elements are whole global batches, ready made.

    It goes through `strategy.experimental_distribute_dataset`, which splits each batch.

    Attributes:
        dataset: elements are dicts of [global batch, ...] tensors.
    """

    dataset: tf.data.Dataset


@dataclasses.dataclass(frozen=True)
class PerReplica:
    """A dataset that its author has split already: an element is one replica's batch.

    Consecutive elements go to consecutive replicas of this input pipeline. Which rows make the
    global batch, on any number of replicas, is then the author's promise.

    Attributes:
        dataset: elements are dicts of [per-replica batch, ...] tensors.
    """

    dataset: tf.data.Dataset
