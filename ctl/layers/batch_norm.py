"""Batch normalization by the statistics of the global batch, however it is split over replicas."""

from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.keras import models
from ctl.kernels import normalization
from ctl.private import classes


@tf_keras.utils.register_keras_serializable(package="ctl")
class SyncBatchNormalization(tf_keras.layers.BatchNormalization):
    """`tf_keras.layers.BatchNormalization` trained by the statistics of the global batch.

        x = ctl.SyncBatchNormalization(momentum=0.9)(x)

    The arguments, weights, checkpoint names and inference are those of the base class, except that
    `synchronized=False` and `fused=True` are rejected. Inputs have any rank, with the rows of the batch
    on axis 0. The differences, in training only:

    * Padding (`ctl.replica.present()`) is excluded from the statistics and from the gradients; rows of
      weight zero are included. A replica without rows takes part like the others; a global batch
      without rows does not change the moving statistics.
    * The moving variance follows the variance that normalized the batch, M2 / n, as in tf_keras with
      `synchronized=True` or `fused=False`. (tf_keras' fused kernel, the default for images, uses
      M2 / (n - 1).)
    * Statistics are float32 under 16-bit policies, as in tf_keras, and float64 under float64.
    * Positions that a Keras mask excludes are normalized, but are not part of the statistics.

    The gradients are those of the global batch if the loss is the SUM of the replicas' contributions:
    gamma and beta get this replica's part, which the step sums over the replicas. On several replicas a
    layer costs one all-reduce of [replicas, 3 channels + 1] numbers in the forward pass, and one of
    [2, channels] in the backward pass. With accumulation the statistics are those of a micro-batch.
    """

    counts_all_rows = True  # those of the global batch

    def __init__(self, *args: Any, **kwargs: Any):
        for name, unsupported in (("synchronized", False), ("fused", True)):
            if kwargs.get(name) is unsupported:
                raise UsageError(
                    f"SyncBatchNormalization does not support {name}={unsupported}: remove it."
                )
        super().__init__(*args, **kwargs)
        self.synchronized = True
        _check_supported(self)

    def add_weight(self, *args: Any, **kwargs: Any) -> tf.Variable:
        """Creates a variable. A checkpoint has the first replica's copy of the moving statistics."""
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            # The copies are equal, but tf_keras would save their mean, and the mean of 3, 5 or 8 equal
            # floats can differ from them in the last bit: a resumed run would differ from one that was
            # not interrupted.
            kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return super().add_weight(*args, **kwargs)

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Normalizes a batch.

        Args:
            inputs: [rows, ...], this replica's rows.
            training: whether to normalize by the statistics of the batch, which the moving statistics
                then follow, instead of by the moving statistics.
            mask: Keras mask, [rows] or [rows, steps, ...], of the positions in the statistics.

        Returns:
            A tensor like `inputs`, in the layer's compute dtype.

        Raises:
            UsageError: the statistics cannot be those of the global batch.
        """
        training = self._get_training_value(training)
        if tf.is_tensor(training):
            training = tf.get_static_value(training)
        # A collective in one branch of a conditional would wait for replicas that took the other one.
        if training is None:
            raise UsageError(f"Layer {self.name} got a tensor as `training`: pass True or False.")
        return self._train(inputs, mask) if training else super().call(inputs, False, mask)

    def _train(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
        _check_supported(self)  # again, because `build` resolves negative axes
        # The cast to the compute dtype comes first: the statistics are those of the rounded inputs.
        x = tf.cast(tf.cast(inputs, self.compute_dtype), self._param_dtype)
        result = normalization.normalize(
            x,
            mask,
            axis=self.axis,
            gamma=self.gamma if self.scale else None,
            beta=self.beta if self.center else None,
            epsilon=self.epsilon,
            name=self.name,
        )
        # The replicas' copies follow the same numbers.
        self._move(self.moving_mean, result, result.mean)
        self._move(self.moving_variance, result, result.variance)
        return tf.ensure_shape(tf.cast(result.outputs, self.compute_dtype), inputs.shape)

    def _move(
        self, variable: tf.Variable, result: normalization.Normalized, value: tf.Tensor
    ) -> None:
        # Passed as a function, which Keras does not call while it only traces shapes.
        self.add_update(
            lambda: variable.assign_sub(
                normalization.moving_step(variable, result, value, self.momentum)
            )
        )


def convert_sync_batch_norm(model: tf_keras.layers.Layer) -> list[str]:
    """Changes the plain batch normalizations of a model to `SyncBatchNormalization`, in place.

        model = tf_keras.applications.ResNet50(weights=None)
        ctl.convert_sync_batch_norm(model)

    Only the class of the layer objects changes: weights, names, checkpoints, inference and the graph of
    a functional model stay. Convert before tracing, because a `tf.function` keeps what it traced.

    Args:
        model: Sequential, functional, subclassed or nested, built or not.

    Returns:
        The names of the converted layers: those whose class is exactly tf_keras' or Keras 3's
        BatchNormalization or experimental.SyncBatchNormalization. Classes derived from these are not
        converted.

    Raises:
        UsageError: a layer cannot be converted; then no layer is.
    """
    model = models.adapt(model)
    if isinstance(model, models.Adapted):
        return model.synchronize_batch_norm()
    layers = tf_keras.layers
    plain = (layers.BatchNormalization, layers.experimental.SyncBatchNormalization)
    unique = {id(layer): layer for layer in model._flatten_layers() if type(layer) in plain}
    for layer in unique.values():
        _check_supported(layer)
    for layer in unique.values():
        # In place, because the graph of a functional model holds the layer.
        classes.set_class(layer, SyncBatchNormalization)
        layer.synchronized = True
        for variable in (layer.moving_mean, layer.moving_variance) if layer.built else ():
            if isinstance(variable, tf.distribute.DistributedValues):
                variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA  # see add_weight
    return [layer.name for layer in unique.values()]


def _check_supported(layer: tf_keras.layers.Layer) -> None:
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    for option in ("renorm", "virtual_batch_size", "adjustment"):
        if getattr(layer, option):
            raise UsageError(f"Layer {layer.name} cannot be synchronized with {option}: remove it.")
    if 0 in axes:
        raise UsageError(f"Layer {layer.name} normalizes axis 0, the rows: choose another axis.")
