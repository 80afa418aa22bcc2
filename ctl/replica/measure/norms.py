"""Global norms of gradients, parameters and updates, averaged over the steps of an inner loop."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.replica.arithmetic.gradients import Gradient, sum_rows
from ctl.replica.measure.layer_norms import GradientShares, LayerNorms

LAYERS = "layers"  # the name of the norms of each variable among the results of a loop


class Norms:
    """Measures the size of gradients, parameters and updates.

        norms = Norms(tf.float32, options)                  # in the strategy's scope
        before = norms.before(variables)                    # in a replica context, before the update
        norms.update(gradients, before, variables, applied=applied)
        norms.result()                                      # {"gradient_norm": ..., ...}

    Each norm is the square root of the sum of squares over all variables: of the reduced gradients
    before clipping, of the variables after the update, and of the change of the variables. Skipped
    steps are excluded from the means. The options may also ask for the norms of each variable, and for
    the shares of zero and non-finite gradients.

    Args:
        dtype: dtype of the means.
        options: what to measure.
    """

    def __init__(self, dtype: tf.DType, options: TrainerOptions):
        names = ("gradient_norm", "parameter_norm", "update_norm") if options.norms else ()
        self._dtype = dtype
        self._options = options
        self._is_updated = False
        self._means = {name: tf_keras.metrics.Mean(name, dtype=dtype) for name in names}
        self._layers: LayerNorms | None = None
        self._shares = GradientShares(dtype) if options.gradient_shares else None

    def build(self, variables: Sequence[tf.Variable]) -> None:
        """Creates the metrics of each variable; call it in the strategy's scope.

        Args:
            variables: all trainable variables.
        """
        if self._options.layer_norms:
            self._layers = LayerNorms(variables, self._dtype)

    def before(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Copies the variables, so that the update can be measured."""
        if not (self._means or self._layers):
            return []
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
        if self._shares:
            self._shares.update(gradients, variables)
        if not before:
            return
        updates = [tf.convert_to_tensor(v) - old for v, old in zip(variables, before, strict=True)]
        if self._layers:
            self._layers.update(gradients, updates, variables, applied=applied)
        if not self._means:
            return
        norms = (global_norm(gradients), global_norm(variables), global_norm(updates))
        for mean, norm in zip(self._means.values(), norms, strict=True):
            # A skipped norm can be NaN, and 0 x NaN is NaN: a weight of 0 would not exclude it.
            value = tf.where(applied, norm, tf.zeros_like(norm))
            mean.update_state(value, sample_weight=tf.cast(applied, norm.dtype))

    def reset(self) -> None:
        """Resets the means."""
        for mean in (*self._means.values(), self._layers, self._shares):
            if isinstance(mean, tf_keras.metrics.Metric):
                mean.reset_state()
            elif mean:
                mean.reset()

    def result(self) -> dict[str, Any]:
        """Returns the means over the steps since `reset`, for each variable under "layers".

        Raises:
            UsageError: no step called `update`.
        """
        if not self._is_updated:
            key = next(k for k in ("norms", "layer_norms", "gradient_shares") if self._asks_for(k))
            raise UsageError(
                f"train.{key} has no effect, because the step never calls self.minimize: set it to "
                "false."
            )
        results: dict[str, Any] = {name: mean.result() for name, mean in self._means.items()}
        return results | ({LAYERS: self._layers.result()} if self._layers else {})

    def shares(self) -> dict[str, tf.Tensor]:
        """Returns the shares of zero and non-finite gradients, which include skipped steps."""
        return self._shares.result() if self._shares else {}

    def _asks_for(self, name: str) -> bool:
        return bool(getattr(self._options, name))


def global_norm(values: Sequence[Gradient]) -> tf.Tensor:
    """Returns the square root of the sum of squares; rows of a sparse gradient are summed first.

    Args:
        values: tensors, variables, `tf.IndexedSlices` or None.
    """
    # Several entries of a sparse gradient for one row are one number of the gradient.
    return tf.linalg.global_norm([sum_rows(value) for value in values])
