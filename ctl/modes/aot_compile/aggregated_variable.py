"""Variables whose updates are all-reduced over the replicas, as under a TPUStrategy."""

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

_OPERATIONS = {
    tf.VariableAggregation.SUM: tf.distribute.ReduceOp.SUM,
    tf.VariableAggregation.MEAN: tf.distribute.ReduceOp.MEAN,
}


class AggregatedVariable(resource_variable_ops.ResourceVariable):
    """A variable whose updates in replica context are first all-reduced by its `aggregation`.

    Under a TPUStrategy, tf_keras makes metrics such variables, so each metric update is a
    collective.
    """

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assigns the aggregate of the replicas' values."""
        return super().assign(self._aggregate(value), *args, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds the aggregate of the replicas' values."""
        return super().assign_add(self._aggregate(delta), *args, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Subtracts the aggregate of the replicas' values."""
        return super().assign_sub(self._aggregate(delta), *args, **kwargs)

    def _aggregate(self, value: Any) -> Any:
        context = tf.distribute.get_replica_context()
        is_alone = context is None or context.num_replicas_in_sync == 1
        if is_alone or tf.executing_eagerly() or isinstance(value, int | float):
            return value
        value = tf.convert_to_tensor(value, self.dtype)
        operation = _OPERATIONS.get(self.aggregation)
        if operation is None:
            return _broadcast_from_first_replica(context, value)
        return _all_reduce(context, operation, value)


def convert_if_aggregated(variable: tf.Variable, kwargs: dict[str, Any]) -> tf.Variable:
    """Makes a new variable an `AggregatedVariable` if all replicas share its value.

    Args:
        variable: the variable, just created.
        kwargs: the arguments it was created with.
    """
    is_per_replica = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
    is_aggregated = kwargs.get("aggregation") not in (None, tf.VariableAggregation.NONE)
    is_plain = type(variable) is resource_variable_ops.ResourceVariable
    if is_aggregated and is_plain and not is_per_replica:
        variable.__class__ = AggregatedVariable
    return variable


def _broadcast_from_first_replica(context: Any, value: tf.Tensor) -> tf.Tensor:
    """Returns the first replica's value, as a sum to which the other replicas add zeros.

    The sum of the bit patterns is exact. XLA all-reduces no 64-bit numbers, so each is sent as two
    32-bit ones.
    """
    is_64_bit = value.dtype.size == 8
    bits = tf.bitcast(value, tf.int32) if is_64_bit else value
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    contribution = tf.where(is_first, bits, tf.zeros_like(bits))
    bits = _all_reduce(context, tf.distribute.ReduceOp.SUM, contribution)
    return tf.bitcast(bits, value.dtype) if is_64_bit else bits


def _all_reduce(context: Any, operation: tf.distribute.ReduceOp, value: tf.Tensor) -> tf.Tensor:
    def reduce(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
        return strategy.extended.reduce_to(operation, value, destinations=value)

    return context.merge_call(reduce, args=(value,))
