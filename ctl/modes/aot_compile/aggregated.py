"""Variables that all replicas change together, as those of a TPUStrategy do."""

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

_OPERATIONS = {
    tf.VariableAggregation.SUM: tf.distribute.ReduceOp.SUM,
    tf.VariableAggregation.MEAN: tf.distribute.ReduceOp.MEAN,
}


class Aggregated(resource_variable_ops.ResourceVariable):
    """A variable whose changes in a replica's code are all-reduced first, by its `aggregation`.

    Metrics are such: under a TPUStrategy, tf_keras makes them so that each update is a collective.
    """

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Sets it to what the replicas' values come to."""
        return super().assign(self._of_all(value), *args, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds what the replicas' values come to."""
        return super().assign_add(self._of_all(delta), *args, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Subtracts what the replicas' values come to."""
        return super().assign_sub(self._of_all(delta), *args, **kwargs)

    def _of_all(self, value: Any) -> Any:
        context = tf.distribute.get_replica_context()
        alone = context is None or context.num_replicas_in_sync == 1
        if alone or tf.executing_eagerly() or isinstance(value, int | float):
            return value
        value = tf.convert_to_tensor(value, self.dtype)
        operation = _OPERATIONS.get(self.aggregation)
        return (
            _firsts(context, value)
            if operation is None
            else _all_reduced(context, operation, value)
        )


def _firsts(context: Any, value: tf.Tensor) -> tf.Tensor:
    """The first replica's value: the others add nothing to it, which is exact also bit by bit.

    XLA reduces no number of 64 bits, so one travels as two of 32.
    """
    wide = value.dtype.size == 8
    bits = tf.bitcast(value, tf.int32) if wide else value
    first = tf.equal(context.replica_id_in_sync_group, 0)
    mine = tf.where(first, bits, tf.zeros_like(bits))
    found = _all_reduced(context, tf.distribute.ReduceOp.SUM, mine)
    return tf.bitcast(found, value.dtype) if wide else found


def _all_reduced(context: Any, operation: tf.distribute.ReduceOp, value: tf.Tensor) -> tf.Tensor:
    def reduce(strategy: tf.distribute.Strategy, mine: tf.Tensor) -> tf.Tensor:
        return strategy.extended.reduce_to(operation, mine, destinations=mine)

    return context.merge_call(reduce, args=(value,))


def aggregated(variable: tf.Variable, kwargs: dict[str, Any]) -> tf.Variable:
    """The variable, made an `Aggregated` one where its arguments ask for one value on all replicas.

    Args:
        variable: just made.
        kwargs: what it was made with.
    """
    own = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
    alone = kwargs.get("aggregation") in (None, tf.VariableAggregation.NONE)
    if not own and not alone and type(variable) is resource_variable_ops.ResourceVariable:
        variable.__class__ = Aggregated
    return variable
