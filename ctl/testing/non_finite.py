"""Makes the losses of one replica at one step non-finite."""

import math

import tensorflow as tf

from ctl.data.source import Nest
from ctl.errors import UsageError
from ctl.trainer import StandardTrainer


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
    replicas = trainer.strategy.num_replicas_in_sync
    if not 0 <= replica < replicas:
        raise UsageError(
            f"There is no replica {replica}: replicas are numbered 0 to {replicas - 1}."
        )
    if trainer._train_loop_fn is not None:
        raise UsageError("The trainer has already trained: call plant before its first step.")
    per_example_loss = trainer.per_example_loss

    def planted(batch: Nest, outputs: Nest) -> tf.Tensor:
        losses = per_example_loss(batch, outputs)
        here = tf.distribute.get_replica_context().replica_id_in_sync_group
        at_step = tf.equal(tf.cast(trainer.global_step.read_value(), tf.int64), step)
        is_bad = tf.logical_and(at_step, tf.equal(tf.cast(here, tf.int32), replica))
        factor = tf.where(is_bad, value, 1.0)
        return tf.nest.map_structure(lambda v: v * tf.cast(factor, v.dtype), losses)

    trainer.per_example_loss = planted  # type: ignore[method-assign]
