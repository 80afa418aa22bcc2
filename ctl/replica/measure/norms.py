"""Norms and shares of gradients, averaged over the steps of an inner loop, and their histograms."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.replica.arithmetic.gradients import Gradient, global_norm, sum_rows

LAYERS = "layers"  # the name of the norms of each variable among the results of a loop
_QUANTITIES = ("gradient_norm", "parameter_norm", "update_norm")
_SHARES = ("gradient_zero_share", "gradient_non_finite_share")


class Norms:
    """Measures the size of gradients, parameters and updates.

        norms = Norms(tf.float32, of_layers=False)          # in the strategy's scope
        before = norms.before(variables)                    # in a replica context, before the update
        norms.update(gradients, before, variables, applied=applied)
        norms.result()                                      # {"gradient_norm": ..., ...}

    Each norm is the square root of the sum of squares over all variables: of the reduced gradients
    before clipping, of the variables after the update, and of the change of the variables. Skipped
    steps are excluded from the means. The shares of zero and non-finite gradients include them.

    Args:
        dtype: dtype of the means.
        of_layers: whether to measure the norms of each variable, too.
    """

    def __init__(self, dtype: tf.DType, *, of_layers: bool):
        self._dtype = dtype
        self._of_layers = of_layers
        self._is_updated = False
        self._means = self._make_means(_QUANTITIES)
        self._shares = self._make_means(_SHARES)
        # [quantities, variables]: a metric for each variable would add three operations per variable to
        # every step.
        self._layers: tf_keras.metrics.MeanTensor | None = None
        self._positions: dict[Any, int] = {}
        self._names: list[str] = []

    def _make_means(self, names: Sequence[str]) -> dict[str, tf_keras.metrics.Mean]:
        return {name: tf_keras.metrics.Mean(name, dtype=self._dtype) for name in names}

    def build(self, variables: Sequence[tf.Variable]) -> None:
        """Creates the metric of each variable; call it in the strategy's scope.

        Args:
            variables: all trainable variables.
        """
        if self._of_layers:
            self._names = [variable.name.removesuffix(":0") for variable in variables]
            self._positions = {variable.ref(): i for i, variable in enumerate(variables)}
            shape = [len(_QUANTITIES), len(variables)]
            self._layers = tf_keras.metrics.MeanTensor(LAYERS, dtype=self._dtype, shape=shape)

    def before(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Copies the variables, so that the update can be measured."""
        # tf.identity reads the value now; the variable itself would later give the new value.
        return [tf.identity(variable) for variable in variables]

    def update(
        self,
        gradients: Sequence[Gradient],
        before: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        *,
        applied: tf.Tensor,
    ) -> None:
        """Adds a step to the means; call it in a replica context, after the update.

        Args:
            gradients: the gradients of the global batch, not clipped; None if there is none.
            before: the result of `before`.
            variables: the variables.
            applied: scalar bool, whether the update was applied.
        """
        # Set while tracing, which is enough to know that the step contains `minimize`.
        self._is_updated = True
        self._add_shares(gradients, variables)
        updates = [tf.convert_to_tensor(v) - old for v, old in zip(variables, before, strict=True)]
        columns = (gradients, variables, updates)

        def norms(*quantities: Sequence[Any]) -> list[tf.Tensor]:
            values = [tf.cast(global_norm(x), self._dtype) for x in quantities]
            # A skipped norm can be NaN, and 0 x NaN is NaN: a weight of 0 would not exclude it.
            return [tf.where(applied, value, tf.zeros_like(value)) for value in values]

        weight = tf.cast(applied, self._dtype)
        if self._layers:
            matrix = [[tf.zeros([], self._dtype)] * len(_QUANTITIES)] * len(self._names)
            weights = [0.0] * len(self._names)
            for row in zip(*columns, strict=True):
                position = self._positions.get(row[1].ref())
                if position is not None and row[0] is not None:
                    matrix[position] = norms(*([value] for value in row))
                    weights[position] = 1.0
            weights = weight * tf.constant([weights] * len(_QUANTITIES), self._dtype)
            self._layers.update_state(tf.transpose(tf.stack(matrix)), sample_weight=weights)
        for mean, norm in zip(self._means.values(), norms(*columns), strict=True):
            mean.update_state(norm, sample_weight=weight)

    def _add_shares(self, gradients: Sequence[Gradient], variables: Sequence[tf.Variable]) -> None:
        """Adds a step; a row that a sparse gradient does not have is zero."""
        non_zero, non_finite, total = [], [], 0
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                values = _elements(gradient)
                non_zero.append(tf.math.count_nonzero(values, dtype=tf.int64))
                finite = tf.math.count_nonzero(tf.math.is_finite(_modulus(values)), dtype=tf.int64)
                non_finite.append(tf.size(values, tf.int64) - finite)
                total += variable.shape.num_elements()
        if total:
            counts = (total - tf.add_n(non_zero), tf.add_n(non_finite))
            for mean, count in zip(self._shares.values(), counts, strict=True):
                mean.update_state(tf.cast(count, self._dtype) / total)

    def reset(self) -> None:
        """Resets the means."""
        for mean in (*self._means.values(), *self._shares.values(), self._layers):
            if mean:
                mean.reset_state()

    def result(self) -> dict[str, Any]:
        """Returns the means over the steps since `reset`, for each variable under "layers".

        Raises:
            UsageError: no step called `update`.
        """
        if not self._is_updated:
            raise UsageError(
                "train.norms has no effect, because the step never calls self.minimize: set it to "
                "''."
            )
        results: dict[str, Any] = {name: mean.result() for name, mean in self._means.items()}
        if self._layers:
            rows = zip(_QUANTITIES, tf.unstack(self._layers.result()), strict=True)
            results[LAYERS] = {
                quantity: dict(zip(self._names, tf.unstack(row), strict=True))
                for quantity, row in rows
            }
        return results

    def shares(self) -> dict[str, tf.Tensor]:
        """Returns the shares of zero and non-finite gradients."""
        return {name: mean.result() for name, mean in self._shares.items()}


def write_histograms(
    gradients: Sequence[Gradient],
    variables: Sequence[tf.Variable],
    *,
    interval: int,
    step: tf.Tensor,
) -> None:
    """Writes the gradients of the global batch for TensorBoard, if the interval divides the step.

    Args:
        gradients: the gradients, not clipped; None if a variable has none.
        variables: the variables.
        interval: steps between two histograms.
        step: scalar, the number of consumed batches.
    """
    with tf.summary.record_if(tf.equal(step % interval, 0)):
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                name = f"gradients/{variable.name.removesuffix(':0')}"
                tf.summary.histogram(name, _modulus(_elements(gradient)))


def _elements(gradient: Any) -> tf.Tensor:
    """Returns the elements of a gradient that may not be zero."""
    values = sum_rows(gradient)
    return values.values if isinstance(values, tf.IndexedSlices) else values


def _modulus(values: tf.Tensor) -> tf.Tensor:
    return tf.abs(values) if values.dtype.is_complex else values
