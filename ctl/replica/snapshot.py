"""The variables that a forward pass assigns, restored if the update is skipped."""

from collections.abc import Iterable, Sequence

import tensorflow as tf
import tf_keras


class Snapshot:
    """The values of variables at one point of a step.

    snapshot = Snapshot(variables)          # in a replica context, before the forward pass
    snapshot.restore_unless(applied)        # after the update
    """

    def __init__(self, variables: Sequence[tf.Variable]):
        """Reads the variables.

        Args:
            variables: variables that can be assigned in a replica context.
        """
        self._variables = variables
        # tf.identity reads the value now; the variable itself would later give the new value.
        self._values = [tf.identity(variable) for variable in variables]

    def restore_unless(self, applied: tf.Tensor) -> None:
        """Assigns the old values if the update was skipped.

        Args:
            applied: scalar bool, the same on every replica.
        """
        # Assigned in any case: a conditional of one replica cannot contain the collectives with which
        # tf.distribute assigns mirrored variables.
        for variable, old in zip(self._variables, self._values, strict=True):
            variable.assign(tf.where(applied, tf.convert_to_tensor(variable), old))


def assigned_in_forward_pass(
    models: Iterable[tf_keras.Model], metrics: Iterable[tf_keras.metrics.Metric]
) -> list[tf.Variable]:
    """Returns the variables that a forward pass may assign: moving statistics and metrics.

    Args:
        models: all models of the trainer.
        metrics: its metrics, which are updated before it is known whether the step is applied.
    """
    statistics = [v for model in models for v in model.non_trainable_variables]
    values = [v for metric in metrics for v in metric.variables]
    unique = {id(variable): variable for variable in (*statistics, *values)}
    # Other mirrored variables cannot be assigned in a replica context: tf.distribute would not know how
    # to combine the replicas' values.
    return [
        v
        for v in unique.values()
        if v.synchronization == tf.VariableSynchronization.ON_READ
        or v.aggregation != tf.VariableAggregation.NONE
    ]
