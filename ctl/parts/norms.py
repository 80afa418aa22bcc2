"""Norms and shares of gradients, averaged over the steps of an inner loop."""

from collections.abc import Sequence
import math
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.update.gradients import Gradient, elements, global_norm, modulus, total
from ctl.update.part import LAYERS, GlobalUpdate, Part
from ctl.update.plan import Plan

_QUANTITIES = ("gradient_norm", "parameter_norm", "update_norm")
_SHARES = ("gradient_zero_share", "gradient_non_finite_share")


class Norms(Part):
    """Measures the size of gradients, parameters and updates: `norms`.

    Each norm is the square root of the sum of squares over all variables: of the reduced gradients
    before clipping, of the variables after the update, and of the change of the variables. Skipped
    steps are excluded from the means. The shares of zero and non-finite gradients include them.

    With "layers" the norms of each variable are measured, too.
    """

    def __init__(self, options: TrainerOptions):
        self.options = options
        self._is_updated = False
        # [quantities, variables]: a metric for each variable would add three operations per variable to
        # every step.
        self._layers: tf_keras.metrics.MeanTensor | None = None
        self._positions: dict[Any, int] = {}
        self._names: list[str] = []

    def create(self, plan: Plan, model: tf_keras.Model) -> None:
        """Creates the means, also those of the variables of layers that are frozen now."""
        self._dtype, variables = plan.dtype, model.trainable_variables
        self._means = self._make_means(_QUANTITIES)
        self._shares = self._make_means(_SHARES)
        if self.options.norms == LAYERS:
            self._names = [variable.name.removesuffix(":0") for variable in variables]
            self._positions = {variable.ref(): i for i, variable in enumerate(variables)}
            shape = [len(_QUANTITIES), len(variables)]
            self._layers = tf_keras.metrics.MeanTensor(LAYERS, dtype=self._dtype, shape=shape)

    def _make_means(self, names: Sequence[str]) -> dict[str, tf_keras.metrics.Mean]:
        return {name: tf_keras.metrics.Mean(name, dtype=self._dtype) for name in names}

    def before(self, update: GlobalUpdate) -> tuple[list[Gradient], list[tf.Tensor]]:
        """Copies the variables, so that the update can be measured."""
        # tf.identity reads the value now; the variable itself would later give the new value.
        return update.gradients, [tf.identity(variable) for variable in update.variables]

    def after(self, update: GlobalUpdate, before: Any, applied: tf.Tensor | bool) -> None:
        """Adds a step to the means."""
        # Set while tracing, which is enough to know that the step contains `minimize`.
        self._is_updated = True
        (gradients, old_values), variables = before, update.variables
        applied = tf.convert_to_tensor(applied)
        self._add_shares(gradients, variables)
        updates = [
            tf.convert_to_tensor(v) - old for v, old in zip(variables, old_values, strict=True)
        ]
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
        existing = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        values = [elements(gradient) for gradient, _ in existing]
        size = sum(variable.shape.num_elements() for _, variable in existing)
        if size:
            counts = (size - total(values, _non_zero), total(values, _non_finite))
            for mean, count in zip(self._shares.values(), counts, strict=True):
                mean.update_state(tf.cast(count, self._dtype) / size)

    def reset(self) -> None:
        """Resets the means."""
        for mean in (*self._means.values(), *self._shares.values(), self._layers):
            if mean:
                mean.reset_state()

    def results(self, *, all_skipped: bool) -> dict[str, Any]:
        """Returns the means over the steps since `reset`, and for each variable under "layers".

        Raises:
            UsageError: no step was measured.
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
        if all_skipped:
            results = tf.nest.map_structure(lambda x: tf.constant(math.nan, x.dtype), results)
        return results | {name: mean.result() for name, mean in self._shares.items()}


def _non_zero(values: tf.Tensor) -> tf.Tensor:
    return tf.math.count_nonzero(values, dtype=tf.int64)


def _non_finite(values: tf.Tensor) -> tf.Tensor:
    finite = tf.math.count_nonzero(tf.math.is_finite(modulus(values)), dtype=tf.int64)
    return tf.size(values, tf.int64) - finite
