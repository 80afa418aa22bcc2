"""Breaks one replica's share of a step on purpose."""

from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.trainer import StandardTrainer


def plant(
    trainer: StandardTrainer, value: float = float("nan"), *, replica: int = 0, step: int = 0
) -> None:
    """Makes the losses of one replica infinite, or not a number, at one step.

        ctl.testing.plant(trainer, float("inf"), replica=1, step=3)
        trainer.train(tf.constant(5))      # step 3 overflows, on replica 1 alone

    The gradients overflow with them. An evaluation at that step is broken too.

    Args:
        trainer: one that has not trained yet: a step that is traced stays as it is.
        value: infinity for an overflow, or NaN.
        replica: whose losses.
        step: `global_step` before the step.

    Raises:
        UsageError: there is no such replica, or the trainer has trained.
    """
    replicas = trainer.strategy.num_replicas_in_sync
    if not 0 <= replica < replicas:
        raise UsageError(f"There is no replica {replica}: the trainer has {replicas}, from 0 on.")
    if trainer._train_loop_fn is not None:
        raise UsageError("The trainer has trained already: plant what is wrong before that.")
    inner = trainer.per_example_loss

    def planted(batch: Any, outputs: Any) -> tf.Tensor:
        losses = inner(batch, outputs)
        context = tf.distribute.get_replica_context()
        here = tf.logical_and(
            tf.equal(context.replica_id_in_sync_group, replica),
            tf.equal(trainer.global_step.read_value(), step),
        )
        return losses * tf.where(here, tf.constant(value, losses.dtype), tf.ones([], losses.dtype))

    trainer.per_example_loss = planted  # type: ignore[method-assign]


def copies(strategy: tf.distribute.Strategy, variable: tf.Variable) -> list[np.ndarray]:
    """Each replica's own copy of a variable.

        first, *others = ctl.testing.copies(trainer.strategy, trainer.model.variables[0])

    Args:
        strategy: on whose replicas.
        variable: one made under its scope.

    Returns:
        An array a replica of this process.
    """
    return [np.asarray(v) for v in strategy.experimental_local_results(variable)]
