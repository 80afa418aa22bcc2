"""Norms of each variable, and shares of zero and non-finite gradients, over an inner loop."""

from collections.abc import Sequence

import tensorflow as tf
import tf_keras

from ctl.replica.arithmetic.gradients import Gradient, sum_rows

QUANTITIES = ("gradient_norm", "parameter_norm", "update_norm")


class LayerNorms:
    """Means of the norms of each variable over the applied steps that train it.

    One metric holds the numbers of all variables: a metric for each would add three operations per
    variable to every step. Create it in the strategy's scope.

    Args:
        variables: all trainable variables.
        dtype: dtype of the means.
    """

    def __init__(self, variables: Sequence[tf.Variable], dtype: tf.DType):
        self._names = [variable.name.removesuffix(":0") for variable in variables]
        self._positions = {variable.ref(): i for i, variable in enumerate(variables)}
        shape = [len(QUANTITIES), len(variables)]
        self._means = tf_keras.metrics.MeanTensor("layer_norms", dtype=dtype, shape=shape)

    def update(
        self,
        gradients: Sequence[Gradient],
        updates: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        *,
        applied: tf.Tensor,
    ) -> None:
        """Adds a step; call it in a replica context, after the update.

        Args:
            gradients: the gradients of the global batch, not clipped; None if there is none.
            updates: the change of each variable.
            variables: the variables.
            applied: scalar bool, whether the update was applied.
        """
        dtype = self._means.dtype
        zero = tf.zeros([], dtype)
        columns = [(zero, zero, zero)] * len(self._names)
        weights = [0.0] * len(self._names)
        for gradient, update, variable in zip(gradients, updates, variables, strict=True):
            position = self._positions.get(variable.ref())
            if position is None or gradient is None:
                continue
            values = (sum_rows(gradient), tf.convert_to_tensor(variable), update)
            # A skipped norm can be NaN, and 0 x NaN is NaN: a weight of 0 would not exclude it.
            columns[position] = tuple(
                tf.where(applied, tf.cast(tf.linalg.global_norm([value]), dtype), zero)
                for value in values
            )
            weights[position] = 1.0
        weight = tf.cast(applied, dtype) * tf.constant([weights] * len(QUANTITIES), dtype)
        self._means.update_state(tf.transpose(tf.stack(columns)), sample_weight=weight)

    def reset(self) -> None:
        """Resets the means."""
        self._means.reset_state()

    def result(self) -> dict[str, dict[str, tf.Tensor]]:
        """Returns quantity -> variable -> mean over the steps since `reset`."""
        rows = self._means.result()
        return {
            quantity: dict(zip(self._names, tf.unstack(rows[i]), strict=True))
            for i, quantity in enumerate(QUANTITIES)
        }


class GradientShares:
    """Means over all steps, even skipped ones, of the shares of zero and of non-finite elements.

    Create it in the strategy's scope.

    Args:
        dtype: dtype of the means.
    """

    def __init__(self, dtype: tf.DType):
        names = ("gradient_zero_share", "gradient_non_finite_share")
        self._means = {name: tf_keras.metrics.Mean(name, dtype=dtype) for name in names}

    def update(self, gradients: Sequence[Gradient], variables: Sequence[tf.Variable]) -> None:
        """Adds a step; call it in a replica context.

        Args:
            gradients: the reduced gradients; None if there is none.
            variables: the variables. A row that a sparse gradient does not have is zero.
        """
        dtype = self._means["gradient_zero_share"].dtype
        non_zero, non_finite, total = [], [], 0
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                values = sum_rows(gradient)
                values = values.values if isinstance(values, tf.IndexedSlices) else values
                non_zero.append(tf.math.count_nonzero(values, dtype=tf.int64))
                finite = tf.cast(tf.math.is_finite(values), tf.int64)
                non_finite.append(tf.size(values, tf.int64) - tf.reduce_sum(finite))
                total += variable.shape.num_elements()
        if total:
            zeros = total - tf.add_n(non_zero)
            for mean, count in zip(
                self._means.values(), (zeros, tf.add_n(non_finite)), strict=True
            ):
                mean.update_state(tf.cast(count, dtype) / total)

    def reset(self) -> None:
        """Resets the means."""
        for mean in self._means.values():
            mean.reset_state()

    def result(self) -> dict[str, tf.Tensor]:
        """Returns the means over the steps since `reset`."""
        return {name: mean.result() for name, mean in self._means.items()}
