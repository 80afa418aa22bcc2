"""Batch normalization by the statistics of the global batch, however it is split over replicas.

Each replica computes the count, the mean and the sum of squared deviations of the elements it
holds; one all-reduce shares them, and every replica merges them in the same order, to the same bits
(Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance: analysis and
recommendations", The American Statistician 37(3), their merge of two parts written for any number):

    n = sum_r n_r,   mean = sum_r n_r mean_r / n,   M2 = sum_r M2_r + sum_r n_r (mean_r - mean)^2

with variance M2 / n; never E[x^2] - E[x]^2, which loses every digit of a variance that is small
beside the mean. So that no other digits are lost, a mean is two numbers: rounded, and what it lacks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.replica import row_mask


@tf_keras.utils.register_keras_serializable(package="ctl")
class SyncBatchNormalization(tf_keras.layers.BatchNormalization):
    """`tf_keras.layers.BatchNormalization` trained by the statistics of the global batch.

    Same arguments, weights, checkpoint names and inference as there, for inputs of any rank whose
    axis 0 is the rows of the batch. What differs, in training only:

    * Padding (`ctl.replica.present()`) counts neither in the statistics nor in the gradients; rows
      of weight zero count. A replica without rows takes part like the others; a global batch
      without rows leaves the moving statistics alone.
    * The moving variance follows the variance that the batch was normalized by, M2 / n, as
      tf_keras' does with `synchronized=True` or `fused=False`. (With its fused kernel, the default
      for images, it follows M2 / (n - 1).)
    * Statistics are float32 under 16-bit policies, as in tf_keras, and float64 under float64.
    * Positions that a Keras mask excludes are normalized, but the statistics are without them.

    Gradients are those of the global batch where the loss is the SUM of the replicas' shares: gamma
    and beta get this replica's part, for the step to sum over the replicas. On several replicas a
    layer costs one all-reduce of [replicas, 3 channels + 1] numbers forward, and one of
    [2, channels] backward. With gradient accumulation the statistics are a micro-batch's.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """Takes what BatchNormalization takes, but for other statistics than the global batch's."""
        for name, wrong in (("synchronized", False), ("fused", True)):
            if kwargs.get(name) is wrong:
                raise UsageError(
                    f"SyncBatchNormalization cannot have {name}={wrong}: leave it out."
                )
        super().__init__(*args, **kwargs)
        self.synchronized = True
        _check_supported(self)

    def add_weight(self, *args: Any, **kwargs: Any) -> tf.Variable:
        """Makes a variable; where each replica has its own copy, the first is the one saved.

        The copies are equal, but tf_keras would save their mean, and the mean of 3, 5 or 8 equal
        floats can differ from them in the last bit: a resumed run would part from an unbroken one.
        """
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return super().add_weight(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: tf.Tensor, training: Any = None, mask: Any = None) -> tf.Tensor:
        """Normalizes a batch.

        Args:
            inputs: [rows, ...], this replica's.
            training: by the batch's statistics, which the moving ones follow; else by the latter.
            mask: Keras' mask, [rows] or [rows, steps, ...], of the positions in the statistics.

        Returns:
            A tensor like `inputs`, in the layer's compute dtype.

        Raises:
            UsageError: the statistics could not be the global batch's.
        """
        training = self._get_training_value(training)
        if tf.is_tensor(training):
            training = tf.get_static_value(training)
        if training is None:
            raise UsageError(f"Layer {self.name} got a tensor as `training`: pass True or False.")
        return self._train(inputs, mask) if training else super().call(inputs, False, mask)

    def _train(self, inputs: tf.Tensor, mask: Any) -> tf.Tensor:
        _check_supported(self)
        x = tf.cast(tf.cast(inputs, self.compute_dtype), self._param_dtype)
        exists, counts = _masks(x, mask, self)
        axes = [axis for axis in range(x.shape.rank) if axis not in self.axis]
        shift, local = _moments(x, counts, axes)
        whole = _merge(local)
        variance = whole.squares / tf.maximum(whole.count, 1)
        self._follow(whole.count, whole.shift + whole.rest, variance)
        per_channel = [
            self.gamma if self.scale else tf.ones(self._param_shape, x.dtype),
            self.beta if self.center else tf.zeros(self._param_shape, x.dtype),
            tf.math.rsqrt(variance + self.epsilon),
            whole.shift - local.shift + whole.rest,
        ]
        gamma, beta, inverse, centre = [tf.reshape(v, shift.shape) for v in per_channel]
        batch = _Batch(inverse, centre, whole.count, exists, counts, axes)
        outputs = _normalize(x - shift, gamma, beta, batch)
        return tf.ensure_shape(tf.cast(outputs, self.compute_dtype), inputs.shape)

    def _follow(self, count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> None:
        """Moves this replica's copy of the moving statistics, by the same numbers on each."""

        def move(variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
            step = (variable - tf.reshape(value, variable.shape)) * (1 - self.momentum)
            # A batch that overflows is one that the step leaves out.
            keep = tf.logical_and(count > 0, tf.math.is_finite(step))
            return variable.assign_sub(tf.where(keep, step, tf.zeros_like(step)))

        # Keras calls them, unless it only traces shapes.
        self.add_update(lambda: move(self.moving_mean, mean))
        self.add_update(lambda: move(self.moving_variance, variance))


def convert_sync_batch_norm(model: tf_keras.layers.Layer) -> list[str]:
    """Turns the plain batch normalizations of a model into `SyncBatchNormalization`, in place.

    It changes the class of the layer objects: weights, names, checkpoints, inference and the graph
    of a functional model stay. Convert before tracing: a `tf.function` keeps what it traced.

    Args:
        model: Sequential, functional, subclassed or nested, built or not.

    Returns:
        The names of the converted layers: those of exactly tf_keras' BatchNormalization or
        experimental.SyncBatchNormalization, not of classes derived from them.

    Raises:
        UsageError: a layer cannot be converted; then none is.
    """
    layers = tf_keras.layers
    plain = (layers.BatchNormalization, layers.experimental.SyncBatchNormalization)
    found = {id(layer): layer for layer in model._flatten_layers() if type(layer) in plain}
    for layer in found.values():
        _check_supported(layer)
    for layer in found.values():
        object.__setattr__(layer, "__class__", SyncBatchNormalization)  # Keras' own would track it
        layer.synchronized = True
        for variable in (layer.moving_mean, layer.moving_variance) if layer.built else ():
            if isinstance(variable, tf.distribute.DistributedValues):
                variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA  # see add_weight
    return [layer.name for layer in found.values()]


class _Moments(NamedTuple):
    """Statistics of some elements, in each of C channels."""

    count: tf.Tensor  # scalar: the elements of a channel
    shift: tf.Tensor  # [C]: the mean, rounded
    rest: tf.Tensor  # [C]: what it lacks
    squares: tf.Tensor  # [C]: the sum of squared deviations from the mean


class _Batch(NamedTuple):
    """What normalizes a replica's elements, given as deviations from the replica's own shift."""

    inverse: tf.Tensor  # one over the standard deviation, shaped to broadcast
    centre: tf.Tensor  # the global mean - shift, shaped to broadcast
    count: tf.Tensor  # scalar: the elements of a channel in the global batch
    exists: tf.Tensor | None  # mask of the rows that are no padding
    counts: tf.Tensor | None  # mask of the positions that are in the statistics
    axes: Sequence[int]  # what the statistics are over


def _moments(x: tf.Tensor, counts: Any, axes: Sequence[int]) -> tuple[tf.Tensor, _Moments]:
    """The shift, shaped to broadcast, and the statistics of this replica's elements.

    By the corrected two-pass algorithm (Chan et al. 1983): the deviations from a rounded mean have
    a mean of their own, which corrects both the mean and the sum of their squares.
    """
    elements = tf.reduce_prod(tf.gather(tf.shape(x, out_type=tf.int64), axes))
    if counts is not None:
        cells = tf.maximum(tf.size(counts, out_type=tf.int64), 1)
        elements = elements // cells * tf.math.count_nonzero(counts)
    count = tf.cast(elements, x.dtype)
    some = tf.maximum(count, 1)
    shift = tf.stop_gradient(_total(_only(counts, x), axes) / some)
    deviations = tf.stop_gradient(_only(counts, x - shift))
    lacking = _total(deviations, axes)
    squares = tf.maximum(_total(tf.square(deviations), axes) - lacking * (lacking / some), 0)
    return shift, _Moments(count, *[tf.reshape(v, [-1]) for v in (shift, lacking / some, squares)])


def _merge(local: _Moments) -> _Moments:
    """The statistics of the global batch, the same bits on every replica."""
    replicas = _replicas()
    if replicas is None:
        return local
    channels = local.shift.shape[0]
    mine = tf.concat([[local.count], *local[1:]], axis=0)
    # A replica fills its row, the others add zeros to it: exact, whatever the order of the sum.
    own = tf.range(replicas.num_replicas_in_sync) == replicas.replica_id_in_sync_group
    table = tf.where(own[:, tf.newaxis], mine, tf.zeros_like(mine))
    table = replicas.all_reduce(tf.distribute.ReduceOp.SUM, table)
    counts, shifts, rests, squares = tf.split(table, [1, channels, channels, channels], axis=1)
    count = tf.reduce_sum(counts)
    part = counts / tf.maximum(count, 1)
    shift = tf.reduce_sum(part * shifts, axis=0)
    means = (shifts - shift) + rests  # relative to the rounded global mean: small numbers
    rest = tf.reduce_sum(part * means, axis=0)
    between = counts * tf.square(means - rest)
    return _Moments(count, shift, rest, tf.reduce_sum(squares + between, axis=0))


def _normalize(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, batch: _Batch) -> tf.Tensor:
    """Computes gamma xhat + beta, xhat = (x - centre) inverse, and its gradient.

    With means over the global batch it is (Ioffe and Szegedy 2015, the chain rule of section 3
    multiplied out; docs/step.md derives it)

        dx = gamma inverse (dy - mean(dy) - xhat mean(dy xhat))

    where elements that are not in the statistics have the first term only, and padding has none.
    """

    @tf.custom_gradient
    def forward(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        scale = gamma * batch.inverse
        return x * scale + (beta - batch.centre * scale), lambda dy: backward(dy, x, gamma)

    @tf.custom_gradient
    def backward(dy: tf.Tensor, x: tf.Tensor, gamma: tf.Tensor) -> tuple[Any, Callable]:
        dy, x = _only(batch.exists, dy), _only(batch.exists, x)
        d_beta = _total(dy, batch.axes)
        d_gamma = (_total(dy * x, batch.axes) - batch.centre * d_beta) * batch.inverse
        sums, replicas = tf.stack([d_beta, d_gamma]), _replicas()
        if replicas:
            sums = replicas.all_reduce(tf.distribute.ReduceOp.SUM, sums)
        mean_dy, mean_dy_xhat = tf.unstack(sums / tf.maximum(batch.count, 1))
        scale = gamma * batch.inverse
        slope = scale * batch.inverse * mean_dy_xhat  # xhat is multiplied out: fewer passes over x
        level = scale * mean_dy - slope * batch.centre
        d_x = scale * dy - _only(batch.counts, slope * x + level)
        return (d_x, d_gamma, d_beta), second

    def second(*_: tf.Tensor) -> None:
        raise UsageError("SyncBatchNormalization has no second derivative: use another layer here.")

    return forward(x, gamma, beta)


def _masks(x: tf.Tensor, mask: Any, layer: SyncBatchNormalization) -> tuple[Any, Any]:
    """Bool of the leading axes of x, or None for all: what exists, and what counts of it."""
    exists = row_mask.current_mask()
    if exists is not None:
        if not x.shape[:1].is_compatible_with(exists.shape):
            raise UsageError(
                f"Layer {layer.name} got {x.shape[0]} rows of a padded batch of {exists.shape[0]}: "
                "keep an example a row, or choose a batch size that needs no padding."
            )
        exists = tf.cast(exists, tf.bool)
    if mask is None:
        return exists, exists
    rank = mask.shape.rank
    if rank > min(layer.axis):
        raise UsageError(
            f"Layer {layer.name} normalizes axis {min(layer.axis)} under a Keras mask of shape "
            f"{mask.shape}: normalize an axis after the mask's."
        )
    return exists, _only(exists, tf.broadcast_to(tf.cast(mask, tf.bool), tf.shape(x)[:rank]))


def _total(values: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Sums an axis at a time.

    All at once, a CPU adds term by term: on 128 images of 112 x 112 near 1000 the mean is off by 15.
    """
    for axis in reversed(axes):
        values = tf.reduce_sum(values, axis, keepdims=True)
    return values


def _only(mask: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor:
    """Zeros where a mask of the leading axes says no; not a product, since 0 x NaN is NaN."""
    if mask is None:
        return values
    ones = tf.ones([values.shape.rank - mask.shape.rank], tf.int32)
    mask = tf.reshape(mask, tf.concat([tf.shape(mask), ones], axis=0))
    return tf.where(mask, values, tf.zeros([], values.dtype))


def _check_supported(layer: tf_keras.layers.Layer) -> None:
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    for what in ("renorm", "virtual_batch_size", "adjustment"):
        if getattr(layer, what):
            raise UsageError(f"Layer {layer.name} has {what}, want it without to synchronize it.")
    if 0 in axes:
        raise UsageError(f"Layer {layer.name} normalizes axis 0, the rows: choose another axis.")


def _replicas() -> Any:
    """The context of several replicas that can meet; None for one, and where a model is built."""
    context = tf.distribute.get_replica_context()
    return None if context is None or context.num_replicas_in_sync == 1 else context
