"""Global norms of gradients, parameters and updates, as the mean over a loop's steps."""

from collections.abc import Sequence

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.replica.gradients import Gradient, sum_rows


class Norms:
    """Watches the size of what a step moves.

        norms = Norms(tf.float32)               # under the strategy's scope
        before = norms.before(variables)        # in a replica context, before the update
        ...
        norms.update(gradients, before, variables, finite=finite)
        norms.result()                          # {"gradient_norm": ..., ...}

    Each is the square root of the sum of squares over all variables: of the reduced gradients before
    clipping, of the variables after the update, and of how far the update moved them. A step that is
    left out, having overflowed, is no part of the means.
    """

    def __init__(self, dtype: tf.DType):
        """Makes the means; call it under the strategy's scope.

        Args:
            dtype: of the means.
        """
        names = ("gradient_norm", "parameter_norm", "update_norm")
        self._traced = False
        self._means = {name: tf_keras.metrics.Mean(name, dtype=dtype) for name in names}

    def before(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Copies of the variables, so that the update can be measured."""
        return [tf.identity(variable) for variable in variables]

    def update(
        self,
        gradients: Sequence[Gradient],
        before: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        *,
        finite: tf.Tensor,
    ) -> None:
        """Counts a step; call it in a replica context, after the update.

        Args:
            gradients: of the global batch, not clipped; None for a variable that has none.
            before: what `before` returned.
            variables: the variables.
            finite: scalar bool, whether the update was applied.
        """
        self._traced = True
        moved = [tf.convert_to_tensor(v) - old for v, old in zip(variables, before, strict=True)]
        norms = (global_norm(gradients), global_norm(variables), global_norm(moved))
        for mean, norm in zip(self._means.values(), norms, strict=True):
            value = tf.where(finite, norm, tf.zeros_like(norm))
            mean.update_state(value, sample_weight=tf.cast(finite, norm.dtype))

    def reset(self) -> None:
        """Begins a loop."""
        for mean in self._means.values():
            mean.reset_state()

    def result(self) -> dict[str, tf.Tensor]:
        """The means over the steps since `reset`.

        Raises:
            UsageError: no step has called `update`.
        """
        if not self._traced:
            raise UsageError(
                "train.norms has no effect: the step never calls self.minimize; leave it false."
            )
        return {name: mean.result() for name, mean in self._means.items()}


def global_norm(values: Sequence[Gradient]) -> tf.Tensor:
    """The square root of the sum of all squares; rows of a sparse gradient are summed first.

    Args:
        values: tensors, variables, `tf.IndexedSlices` or None.
    """
    return tf.linalg.global_norm([sum_rows(value) for value in values])
