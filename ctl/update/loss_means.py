"""The means of several losses over the steps of an inner loop."""

from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError


class LossMeans:
    """The mean of each loss with a name over the applied steps; create it in the strategy's scope.

    Args:
        names: the names of the losses; none if there is one loss, which has no name.
        dtype: the dtype of the means.
    """

    def __init__(self, names: Iterable[str], dtype: tf.DType):
        self._dtype = dtype
        self._is_updated = False
        self._means = {name: tf_keras.metrics.Mean(f"{name}_loss", dtype=dtype) for name in names}

    def update(
        self,
        shares: Sequence[Mapping[str, tf.Tensor]],
        applied: Mapping[str, tf.Tensor | bool],
    ) -> None:
        """Adds a step; call it in a replica context.

        Args:
            shares: for each micro-batch of this replica, name -> its share of the global loss.
            applied: name -> scalar, whether the update by this loss was applied.
        """
        self._is_updated = True
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        for name, mean in self._means.items():
            # The sum over the replicas is the loss, but the metric also counts each replica.
            value = tf.add_n([each[name] for each in shares]) * replicas
            # A skipped loss can be NaN, and 0 x NaN is NaN.
            value = tf.where(tf.cast(applied[name], tf.bool), value, tf.zeros_like(value))
            mean.update_state(value, sample_weight=tf.cast(applied[name], self._dtype))

    def reset(self) -> None:
        """Resets the means."""
        for mean in self._means.values():
            mean.reset_state()

    def result(self) -> dict[str, tf.Tensor]:
        """Returns the means, named as tf_keras does: the loss "age" is "age_loss".

        Raises:
            UsageError: the losses have names, but no step called `update`.
        """
        if self._means and not self._is_updated:
            raise UsageError(
                "loss_weights has no effect, because the step never calls self.minimize: remove it."
            )
        return {f"{name}_loss": mean.result() for name, mean in self._means.items()}
