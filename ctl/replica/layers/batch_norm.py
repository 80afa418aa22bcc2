"""Batch normalization by the statistics of the global batch, however it is split over replicas."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.replica.arithmetic import moments, row_mask, waits
from ctl.replica.graphs import passes
from ctl.replica.layers import recompute


@tf_keras.utils.register_keras_serializable(package="ctl")
class SyncBatchNormalization(tf_keras.layers.BatchNormalization):
    """`tf_keras.layers.BatchNormalization` trained by the statistics of the global batch.

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

    def call(self, inputs: tf.Tensor, training: Any = None, mask: Any = None) -> tf.Tensor:
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

    def _train(self, inputs: tf.Tensor, mask: Any) -> tf.Tensor:
        _check_supported(self)  # again, because `build` resolves negative axes
        # The cast to the compute dtype comes first: the statistics are those of the rounded inputs.
        x = tf.cast(tf.cast(inputs, self.compute_dtype), self._param_dtype)
        existing, included = _masks(x, mask, self)
        axes = [axis for axis in range(x.shape.rank) if axis not in self.axis]
        # A recomputation uses the statistics of the first pass: it needs no further all-reduce.
        shift, local, merged = passes.keep(lambda: _compute_moments(x, included, axes))
        variance = merged.squares / tf.maximum(merged.count, 1)
        self._update_moving(merged.count, merged.shift + merged.error, variance)
        per_channel = [
            self.gamma if self.scale else tf.ones(self._param_shape, x.dtype),
            self.beta if self.center else tf.zeros(self._param_shape, x.dtype),
            tf.math.rsqrt(variance + self.epsilon),
            merged.shift - local.shift + merged.error,
        ]
        gamma, beta, inverse, center = [tf.reshape(v, shift.shape) for v in per_channel]
        statistics = _Statistics(inverse, center, merged.count, existing, included, axes)
        outputs = _normalize(x - shift, gamma, beta, statistics)
        return tf.ensure_shape(tf.cast(outputs, self.compute_dtype), inputs.shape)

    def _update_moving(self, count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> None:
        """Updates this replica's copies of the moving statistics, by the same numbers on each."""

        def move(variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
            step = (variable - tf.reshape(value, variable.shape)) * (1 - self.momentum)
            # A NaN would stay in a moving average permanently, even if the step is skipped.
            valid = tf.logical_and(count > 0, tf.math.is_finite(step))
            return variable.assign_sub(tf.where(valid, step, tf.zeros_like(step)))

        # Passed as functions, which Keras does not call while it only traces shapes.
        self.add_update(lambda: move(self.moving_mean, mean))
        self.add_update(lambda: move(self.moving_variance, variance))


def convert_sync_batch_norm(model: tf_keras.layers.Layer) -> list[str]:
    """Changes the plain batch normalizations of a model to `SyncBatchNormalization`, in place.

    Only the class of the layer objects changes: weights, names, checkpoints, inference and the graph of
    a functional model stay. Convert before tracing, because a `tf.function` keeps what it traced.

    Args:
        model: Sequential, functional, subclassed or nested, built or not.

    Returns:
        The names of the converted layers: those whose class is exactly tf_keras' BatchNormalization or
        experimental.SyncBatchNormalization. Classes derived from these are not converted.

    Raises:
        UsageError: a layer cannot be converted; then no layer is.
    """
    layers = tf_keras.layers
    plain = (layers.BatchNormalization, layers.experimental.SyncBatchNormalization)
    unique = {id(layer): layer for layer in model._flatten_layers() if type(layer) in plain}
    for layer in unique.values():
        _check_supported(layer)
    for layer in unique.values():
        # Keras' own __setattr__ would track the class as an attribute of the layer.
        object.__setattr__(layer, "__class__", SyncBatchNormalization)
        layer.synchronized = True
        if hasattr(layer.call, "ctl_recomputes"):  # it recomputes `call` of the former class
            object.__delattr__(layer, "call")
            recompute.recompute(layer)
        for variable in (layer.moving_mean, layer.moving_variance) if layer.built else ():
            if isinstance(variable, tf.distribute.DistributedValues):
                variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA  # see add_weight
    return [layer.name for layer in unique.values()]


def _compute_moments(
    x: tf.Tensor, included: Any, axes: Sequence[int]
) -> tuple[tf.Tensor, moments.Moments, moments.Moments]:
    """Returns this replica's shift, shaped to broadcast, and the local and the global statistics."""
    shift, local = moments.local_moments(x, included, axes)
    return shift, local, moments.merge(local)


class _Statistics(NamedTuple):
    """The statistics that normalize a replica's elements, which are deviations from its shift."""

    inverse: tf.Tensor  # 1 / standard deviation, shaped to broadcast
    center: tf.Tensor  # global mean - this replica's shift, shaped to broadcast
    count: tf.Tensor  # scalar: the number of elements per channel in the global batch
    existing: tf.Tensor | None  # mask of the rows that exist
    included: tf.Tensor | None  # mask of the positions in the statistics
    axes: Sequence[int]  # the axes that the statistics reduce


def _normalize(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, statistics: _Statistics
) -> tf.Tensor:
    """Computes gamma xhat + beta with xhat = (x - center) inverse, and its gradient.

    With means over the global batch the gradient is (Ioffe and Szegedy 2015, the chain rule of section
    3 multiplied out; docs/step.md, section 12, derives it)

        dx = gamma inverse (dy - mean(dy) - xhat mean(dy xhat))

    Elements outside of the statistics have only the first term, and padding has none.
    """

    # A custom gradient needs one reduction of [2, channels] numbers; autodiff would reduce the complete
    # table of `moments.merge` again, [replicas, 3 channels + 1].
    def differentiate(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        inverse, center, count, existing, included, axes = statistics
        dy, rows = moments.zero_outside(existing, dy), moments.zero_outside(existing, x)
        d_beta = moments.sum_over(dy, axes)
        d_gamma = (moments.sum_over(dy * rows, axes) - center * d_beta) * inverse
        sums, context = tf.stack([d_beta, d_gamma]), moments.replica_context()
        if context:
            # `stop_gradient`, as in `moments.merge`.
            own_sums = tf.stop_gradient(sums)
            sums = context.all_reduce(tf.distribute.ReduceOp.SUM, own_sums)
            waits.observe(own_sums, sums)
        mean_dy, mean_dy_xhat = tf.unstack(sums / tf.maximum(count, 1))
        scale = gamma * inverse
        # xhat is multiplied out: two numbers per channel, and fewer passes over x.
        slope = scale * inverse * mean_dy_xhat
        offset = scale * mean_dy - slope * center
        d_x = scale * dy - moments.zero_outside(included, slope * rows + offset)
        # This replica's d_gamma and d_beta: the step reduces them with all other gradients.
        return _attach_gradient((d_x, d_gamma, d_beta), (dy, x, gamma), second)

    def second(*_: tf.Tensor) -> None:
        raise UsageError(
            "SyncBatchNormalization has no second derivative: use another normalization here."
        )

    scale = gamma * statistics.inverse
    outputs = x * scale + (beta - statistics.center * scale)
    return _attach_gradient((outputs,), (x, gamma, beta), differentiate)[0]


def _attach_gradient(
    values: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], gradient: Callable[..., Any]
) -> tuple[tf.Tensor, ...]:
    """Returns values whose gradient by the inputs is what `gradient` computes."""

    # The values are arguments, too, although they have no gradient: tf.custom_gradient searches the
    # graph from the results back to the arguments for variables. For values that are computed inside,
    # the search visits all earlier layers, and through the collectives those of the other replicas:
    # the first step of ResNet-50 took 3 minutes.
    @tf.custom_gradient
    def attach(*tensors: tf.Tensor) -> tuple[Any, Callable]:
        def backward(*upstream: tf.Tensor) -> Any:
            return (*gradient(*upstream), *[None] * len(values))

        return [tf.identity(value) for value in tensors[len(inputs) :]], backward

    return tuple(attach(*inputs, *values))


def _masks(x: tf.Tensor, mask: Any, layer: SyncBatchNormalization) -> tuple[Any, Any]:
    """Returns masks of leading axes of x: rows that exist, positions in the statistics; None for all."""
    existing = row_mask.current_mask()
    if existing is not None:
        if not x.shape[:1].is_compatible_with(existing.shape):
            raise UsageError(
                f"Layer {layer.name} got {x.shape[0]} rows of a padded batch of "
                f"{existing.shape[0]}: keep one example per row, or choose a batch size that needs "
                "no padding."
            )
        existing = tf.cast(existing, tf.bool)
    if mask is None:
        return existing, existing
    rank = mask.shape.rank
    if rank > min(layer.axis):
        raise UsageError(
            f"Layer {layer.name} normalizes axis {min(layer.axis)}, which its Keras mask of shape "
            f"{mask.shape} covers: normalize an axis after those of the mask."
        )
    included = tf.broadcast_to(tf.cast(mask, tf.bool), tf.shape(x)[:rank])
    return existing, moments.zero_outside(existing, included)


def _check_supported(layer: tf_keras.layers.Layer) -> None:
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    for option in ("renorm", "virtual_batch_size", "adjustment"):
        if getattr(layer, option):
            raise UsageError(f"Layer {layer.name} cannot be synchronized with {option}: remove it.")
    if 0 in axes:
        raise UsageError(f"Layer {layer.name} normalizes axis 0, the rows: choose another axis.")
