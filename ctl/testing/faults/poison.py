"""NaN in the training data: in examples, or in one replica's batch of one step."""

from collections.abc import Sequence
import math

import tensorflow as tf

from ctl.data.source import Arrays, Batch, Source
from ctl.errors import UsageError
from ctl.replica import row_mask
from ctl.trainer import StandardTrainer


def poisoned(
    source: Source, examples: Sequence[int], feature: str, *, value: float = math.nan
) -> Source:
    """A source with some examples that are not finite, whenever and wherever they are read.

        def build_dataset(self, split, input_context):
            return faults.poisoned(ctl.data.arrays({"x": X, "label": Y}), [17], "x")

    Args:
        source: the examples.
        examples: their numbers.
        feature: of floating point.
        value: what all numbers of the feature become.

    Returns:
        A source of the same length; of arrays again arrays, which may be placed on a device.

    Raises:
        UsageError: there is no such example, or no such feature of floating point.
    """
    outside = [example for example in examples if not 0 <= example < len(source)]
    if outside:
        raise UsageError(f"Example {outside[0]} is to be poisoned: want 0 to {len(source) - 1}.")
    found = _Poisoned(source, examples, feature, value)
    found.gather(tf.constant([0], tf.int64))  # tells a mistake now
    if isinstance(source, Arrays):
        return Arrays(found.gather(tf.range(len(source), dtype=tf.int64)))
    return found


def poisoned_step(
    batch: Batch, feature: str, *, step: int, replica: int, value: float = math.nan
) -> Batch:
    """A batch that is not finite on one replica in one step; call it where the replica's step is.

        def forward(self, batch, training):
            if training:
                batch = faults.poisoned_step(batch, "x", step=33, replica=1)
            return super().forward(batch, training)

    It is a function of the step and the replica, so a run that comes by the step again meets it
    again.

    Args:
        batch: the replica's rows.
        feature: of floating point.
        step: the global step of the batch: how many were made before.
        replica: whose rows, numbered over all workers.
        value: what all numbers of the feature become.

    Returns:
        The batch; the same outside of any step, as when the model is built.

    Raises:
        UsageError: there is no such replica, or no such feature of floating point.
    """
    _check(batch, feature)
    whole, context = row_mask.current(), tf.distribute.get_replica_context()
    if whole is None or context is None:
        return batch
    if not 0 <= replica < context.num_replicas_in_sync:
        raise UsageError(
            f"Replica {replica} is to be poisoned: want 0 to {context.num_replicas_in_sync - 1}."
        )
    now = tf.equal(tf.cast(whole.step, tf.int64), step)
    here = tf.equal(tf.cast(context.replica_id_in_sync_group, tf.int32), replica)
    return _with(batch, feature, tf.logical_and(now, here), value)


def example_on(trainer: StandardTrainer, *, step: int, replica: int, row: int = 0) -> int:
    """Which example a replica reads in a row of a step, to be poisoned in the source.

    Args:
        trainer: whose data and replicas.
        step: the global step of the batch: how many were made before.
        replica: numbered over all workers.
        row: among the replica's own.

    Raises:
        UsageError: the data has no numbers, or there is no such row.
    """
    shares = trainer.layout.row_counts()
    if not 0 <= replica < len(shares) or not 0 <= row < shares[replica]:
        raise UsageError(
            f"Row {row} of replica {replica} is asked for, and the replicas have {shares} rows."
        )
    indexes = trainer.feed.example_indexes(trainer.global_batch_size, step)
    if indexes is None:
        raise UsageError("The examples have no numbers: let build_dataset return a Source.")
    return indexes[replica * trainer.layout.rows_per_replica + row]


class _Poisoned(Source):
    """Another source, of which some examples are not finite."""

    def __init__(self, source: Source, examples: Sequence[int], feature: str, value: float):
        """Reads nothing yet."""
        self._source = source
        self._examples = list(examples)
        self._feature = feature
        self._value = value

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self._source)

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads examples, the poisoned ones among them."""
        batch = self._source.gather(indexes)
        _check(batch, self._feature)
        examples = tf.constant(self._examples, tf.int64)
        found = tf.reduce_any(tf.equal(indexes[:, tf.newaxis], examples), axis=1)
        return _with(batch, self._feature, found, self._value)


def _check(batch: Batch, feature: str) -> None:
    floats = [name for name, values in batch.items() if values.dtype.is_floating]
    if feature not in floats:
        raise UsageError(
            f"{feature!r} is to be poisoned: want a feature of floating point, "
            f"{', '.join(map(repr, floats)) or 'of which there is none'}."
        )


def _with(batch: Batch, feature: str, where: tf.Tensor, value: float) -> Batch:
    """The batch with another value in the rows, or in all, where `where` is true."""
    values = batch[feature]
    if where.shape.rank:
        where = tf.reshape(where, tf.concat([[-1], tf.ones([tf.rank(values) - 1], tf.int32)], 0))
    bad = tf.constant(value, values.dtype)
    return {**batch, feature: tf.ensure_shape(tf.where(where, bad, values), values.shape)}
