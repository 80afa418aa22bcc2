"""Makes examples, or the batch or losses of one replica at one step, non-finite."""

from collections.abc import Sequence
import math
from typing import Any

import tensorflow as tf

from ctl.data.source import Arrays, Batch, Source
from ctl.errors import UsageError
from ctl.replica.arithmetic import row_mask
from ctl.replica.step.engine import engine_of
from ctl.trainer import StandardTrainer


def poisoned(source: Source, examples: Sequence[int], feature: str) -> Source:
    """Makes some examples of a source NaN, every time they are read.

        def build_dataset(self, split, input_context):
            return faults.poisoned(ctl.data.arrays({"x": X, "label": Y}), [17], "x")

    Args:
        source: the examples.
        examples: indexes of the examples to change.
        feature: name of a floating-point feature.

    Returns:
        A source of the same length. For arrays it is `Arrays` again, which can be placed on a device.

    Raises:
        UsageError: there is no such example or no such floating-point feature.
    """
    outside = [example for example in examples if not 0 <= example < len(source)]
    if outside:
        raise UsageError(
            f"Example {outside[0]} cannot be poisoned: indexes must be 0 to {len(source) - 1}."
        )
    result = _Poisoned(source, examples, feature)
    result.gather(tf.constant([0], tf.int64))  # raises for a wrong feature now, not in training
    if isinstance(source, Arrays):
        return Arrays(result.gather(tf.range(len(source), dtype=tf.int64)))
    return result


def poisoned_step(
    batch: Batch, feature: str, *, step: int, replica: int, value: float = math.nan
) -> Batch:
    """Makes a batch non-finite on one replica at one step. Call it inside the replica's step.

        def forward(self, batch, training):
            if training:
                batch = faults.poisoned_step(batch, "x", step=33, replica=1)
            return super().forward(batch, training)

    It depends only on the step and the replica, so a run that repeats the step is poisoned again.

    Args:
        batch: the replica's rows.
        feature: name of a floating-point feature.
        step: global step of the batch, counted from 0.
        replica: index of the replica, over all workers.
        value: the new value of all elements of the feature.

    Returns:
        The batch; unchanged outside of a step, as when the model is built.

    Raises:
        UsageError: there is no such replica or no such floating-point feature.
    """
    _check_feature(batch, feature)
    rows, context = row_mask.current(), tf.distribute.get_replica_context()
    if rows is None or context is None:
        return batch
    _check_replica(replica, context.num_replicas_in_sync)
    return _replace(batch, feature, _is_at(rows.step, step, replica), value)


def plant(
    trainer: StandardTrainer, value: float = math.nan, *, replica: int = 0, step: int = 0
) -> None:
    """Makes the losses of one replica non-finite at one step, and with them its gradients.

        ctl.testing.plant(trainer, float("inf"), replica=1, step=3)
        trainer.train(tf.constant(5))      # step 3 overflows, only on replica 1

    An evaluation at that step is non-finite, too.

    Args:
        trainer: a trainer that has not trained yet, since a traced step cannot be changed.
        value: infinity for an overflow, or NaN.
        replica: index of the replica.
        step: value of `global_step` before the step.

    Raises:
        UsageError: there is no such replica, or the trainer has already trained.
    """
    _check_replica(replica, trainer.strategy.num_replicas_in_sync)
    if trainer._train_loop_fn is not None:
        raise UsageError("The trainer has already trained: call plant before its first step.")
    per_example_loss = trainer.per_example_loss

    def planted(batch: Any, outputs: Any) -> tf.Tensor:
        losses = per_example_loss(batch, outputs)
        factor = tf.where(_is_at(trainer.global_step.read_value(), step, replica), value, 1.0)
        return tf.nest.map_structure(lambda v: v * tf.cast(factor, v.dtype), losses)

    trainer.per_example_loss = planted  # type: ignore[method-assign]


def example_on(trainer: StandardTrainer, *, step: int, replica: int) -> int:
    """Returns the index of the first example that a replica reads at a step.

    Args:
        trainer: the trainer whose data is read.
        step: global step of the batch, counted from 0.
        replica: index of the replica, over all workers.

    Raises:
        UsageError: the data has no indexes, or the replica has no row.
    """
    engine = engine_of(trainer)
    counts = engine.plan.layout.row_counts()
    if not 0 <= replica < len(counts) or not counts[replica]:
        raise UsageError(f"There is no row on replica {replica}: the replicas have {counts} rows.")
    indexes = engine.pipeline.example_indexes(trainer.global_batch_size, step)
    if indexes is None:
        raise UsageError("The examples have no indexes: return a Source from build_dataset.")
    return indexes[replica * engine.plan.layout.rows_per_replica]


class _Poisoned(Source):
    """A source with NaN in some examples of another one."""

    def __init__(self, source: Source, examples: Sequence[int], feature: str):
        self._source, self._feature = source, feature
        self._examples = list(examples)
        self.has_one_shape = source.has_one_shape
        self.training_order = source.training_order  # type: ignore[method-assign]
        self.evaluation_order = source.evaluation_order  # type: ignore[method-assign]

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self._source)

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads examples and replaces the values of those to be poisoned."""
        batch = self._source.gather(indexes)
        _check_feature(batch, self._feature)
        examples = tf.constant(self._examples, tf.int64)
        # The indexes of a bucketed source contain the bucket, too.
        numbers = indexes % len(self)
        is_poisoned = tf.reduce_any(tf.equal(numbers[:, tf.newaxis], examples), axis=1)
        return _replace(batch, self._feature, is_poisoned, math.nan)


def _check_feature(batch: Batch, feature: str) -> None:
    tensors = {name: value for name, value in batch.items() if tf.is_tensor(value)}
    names = [name for name, value in tensors.items() if value.dtype.is_floating]
    if feature not in names:
        raise UsageError(
            f"Feature {feature!r} cannot be poisoned: the floating-point features are "
            f"{', '.join(map(repr, names)) or 'none'}."
        )


def _check_replica(replica: int, replicas: int) -> None:
    if not 0 <= replica < replicas:
        raise UsageError(
            f"There is no replica {replica}: replicas are numbered 0 to {replicas - 1}."
        )


def _is_at(current: tf.Tensor, step: int, replica: int) -> tf.Tensor:
    """Returns whether the code runs at a step and on a replica, as a scalar bool."""
    here = tf.distribute.get_replica_context().replica_id_in_sync_group
    at_step = tf.equal(tf.cast(current, tf.int64), step)
    return tf.logical_and(at_step, tf.equal(tf.cast(here, tf.int32), replica))


def _replace(batch: Batch, feature: str, where: tf.Tensor, value: float) -> Batch:
    """Replaces a feature where `where` is true, a scalar or [rows]."""
    values = batch[feature]
    if where.shape.rank:
        where = tf.reshape(where, tf.concat([[-1], tf.ones([tf.rank(values) - 1], tf.int32)], 0))
    constant = tf.constant(value, values.dtype)
    return {**batch, feature: tf.ensure_shape(tf.where(where, constant, values), values.shape)}
