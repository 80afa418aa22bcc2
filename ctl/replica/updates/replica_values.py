"""A variable whose value differs between replicas, and whose checkpoint has the value of each."""

from typing import Any

import tensorflow as tf

from ctl.replica.updates.slices import make_gather


class ReplicaValues(tf.__internal__.tracking.Trackable):
    """A variable with one value per replica, saved as one [replicas, ...] tensor.

    If it is restored on the same number of replicas, each gets its own value back, bit for bit. On a
    different number N, each gets the sum of all values divided by N, which keeps the sum over replicas.

    TensorFlow's ON_READ variables with the aggregation SUM save only the sum.

    The variable is zero on every replica at first. Create it in the strategy's scope.

    Args:
        reference: a variable that has the shape and the dtype of one replica's value.
        name: the name of the variable.
        strategy: the strategy of the variable.

    Attributes:
        shape: [None, ...], because a checkpoint may have the values of any number of replicas.
        dtype: the dtype of the values.
        local: the distributed variable; in a replica context, this replica's value.
    """

    trainable = False
    synchronization = tf.VariableSynchronization.ON_READ
    aggregation = tf.VariableAggregation.SUM

    def __init__(self, reference: tf.Variable, name: str, strategy: tf.distribute.Strategy):
        # The dtype of a variable in mixed precision is `true_dtype`.
        dtype = getattr(reference, "true_dtype", reference.dtype)
        with strategy.extended.colocate_vars_with(reference):
            self.local = tf.Variable(
                tf.zeros(reference.shape, dtype),
                trainable=False,
                name=name,
                synchronization=self.synchronization,
                aggregation=self.aggregation,
            )
        self.name, self.dtype = self.local.name, dtype
        self.shape = tf.TensorShape([None, *reference.shape])
        self._shared_name = name
        self._strategy = strategy
        self._gather = make_gather(strategy)

    def read_value(self) -> tf.Tensor:
        """Collective: returns the values of all replicas, [replicas, ...], on the CPU."""
        with tf.device("CPU:0"):
            parts = [tf.identity(component) for component in self._components()]
            if len(parts) == self._strategy.num_replicas_in_sync:
                return tf.stack(parts)
            values = iter(parts)
            local = self._strategy.experimental_distribute_values_from_function(
                lambda _: next(values)
            )
            return tf.identity(self._gather(local))

    def assign(self, value: Any) -> None:
        """Assigns each replica its value.

        Args:
            value: [n, ...], the values of n replicas. If n is not the number of replicas, each replica
                gets an equal part of their sum.
        """
        value = tf.convert_to_tensor(value)
        replicas = self._strategy.num_replicas_in_sync
        if value.shape[0] != replicas:
            value = tf.repeat(tf.reduce_sum(value, axis=0, keepdims=True) / replicas, replicas, 0)
        components = self._components()
        for local, component in enumerate(components):
            replica = local
            if len(components) < replicas:  # the others are in other processes
                replica = self._strategy.extended._get_replica_id_in_sync_group(local)
            component.assign(value[replica])

    def numpy(self) -> Any:
        """Collective: returns the values of all replicas as an array, [replicas, ...]."""
        return self.read_value().numpy()

    def _components(self) -> Any:
        return getattr(self.local, "values", [self.local])

    def _should_act_as_resource_variable(self) -> None:
        """Makes TensorFlow store the name of the variable in checkpoints."""

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        values = self.read_value()
        # Every worker must take part in the gather, but only the chief's files are kept.
        return {
            "VARIABLE_VALUE": values if self._strategy.extended.should_checkpoint else values[:0]
        }

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored["VARIABLE_VALUE"])

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """Copies the values for a checkpoint that a thread writes."""
        if self not in object_map:
            shape = [self._strategy.num_replicas_in_sync, *self.shape[1:]]
            with tf.device("CPU:0"), tf.init_scope():
                object_map[self] = tf.Variable(
                    tf.zeros(shape, self.dtype), name=self._shared_name, trainable=False
                )
        object_map[self].assign(self.read_value())
