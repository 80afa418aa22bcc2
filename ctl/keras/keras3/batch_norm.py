"""Batch normalization of Keras 3 by the statistics of the global batch, however it is split."""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import keras
import tensorflow as tf

from ctl.errors import UsageError, type_name
from ctl.graphs import passes
from ctl.keras.keras3 import private
from ctl.kernels import normalization
from ctl.private import classes


class BatchNormalization(keras.layers.BatchNormalization):
    """Replaces the class of the BatchNormalization layers of a model.

    With `synchronized=True` it computes like `ctl.SyncBatchNormalization`, and else like Keras. The
    moving statistics are variables like those of tf_keras: each replica has its own copy.
    """

    def add_weight(self, *args: Any, **kwargs: Any) -> Any:
        """Creates a keras.Variable; that of a moving statistic has a value of each replica."""
        if not str(kwargs.get("name")).startswith("moving_"):
            return super().add_weight(*args, **kwargs)

        def create(creator: Callable[..., Any], **options: Any) -> Any:
            return creator(**options | _local(self.synchronized))

        with tf.variable_creator_scope(create):
            return super().add_weight(*args, **kwargs)

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Normalizes a batch; see `ctl.SyncBatchNormalization.call`."""
        if not (self.synchronized and training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        axis = self.axis % len(inputs.shape)
        if axis == 0:
            raise UsageError(f"Layer {self.name} normalizes axis 0, the rows: choose another axis.")
        result = normalization.normalize(
            tf.cast(inputs, self.variable_dtype),
            mask,
            axis=[axis],
            gamma=tf.convert_to_tensor(private.value_of(self.gamma)) if self.scale else None,
            beta=tf.convert_to_tensor(private.value_of(self.beta)) if self.center else None,
            epsilon=self.epsilon,
            name=self.name,
        )
        pairs = ((self.moving_mean, result.mean), (self.moving_variance, result.variance))

        def move() -> None:
            for statistic, value in pairs:
                variable = private.value_of(statistic)
                variable.assign_sub(
                    normalization.moving_step(variable, result, value, self.momentum)
                )

        passes.keep(move)  # once, even if the layer is recomputed
        return tf.ensure_shape(tf.cast(result.outputs, self.compute_dtype), inputs.shape)


def prepare(layer: Any) -> None:
    """Replaces the class of a layer if it is exactly Keras' BatchNormalization.

    Raises:
        UsageError: a layer of a derived class is synchronized, which Keras computes.
    """
    kind = keras.layers.BatchNormalization
    if type(layer) is kind:
        # In place, because the graph of a functional model holds the layer.
        classes.set_class(layer, BatchNormalization)
    if not isinstance(layer, kind):
        return
    if layer.synchronized and not isinstance(layer, BatchNormalization):
        raise UsageError(
            f"Layer {layer.name} is {type_name(layer)} with synchronized=True, which counts padding and "
            "loses the variance of large means: use keras.layers.BatchNormalization itself."
        )
    if layer.built:
        for variable in (layer.moving_mean, layer.moving_variance):
            _make_local(variable, layer.synchronized)


def synchronize(model: Any) -> list[str]:
    """Makes the plain batch normalizations of a model use the statistics of the global batch.

    Returns:
        The names of the layers that were changed.
    """
    layers = [model, *private.layers_of(model, recursive=True)]
    plain = [v for v in layers if type(v) is BatchNormalization and not v.synchronized]
    for layer in plain:
        layer.synchronized = True
        prepare(layer)
    return [layer.name for layer in plain]


@contextlib.contextmanager
def original_classes(model: Any) -> Iterator[None]:
    """Gives the layers of a model Keras' own classes within a `with` block."""
    layers = [model, *private.layers_of(model, recursive=True)]
    own = [layer for layer in layers if type(layer) is BatchNormalization]
    for layer in own:
        classes.set_class(layer, keras.layers.BatchNormalization)  # as in `prepare`
    try:
        yield
    finally:
        for layer in own:
            prepare(layer)


def _local(synchronized: bool) -> dict[str, Any]:
    """Returns the arguments of a tf.Variable for a moving statistic.

    Synchronized copies are equal, and the first one is saved; of others the mean is, as in tf_keras.
    """
    kinds = tf.VariableAggregation
    return {
        "trainable": False,
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": kinds.ONLY_FIRST_REPLICA if synchronized else kinds.MEAN,
    }


def _make_local(variable: Any, synchronized: bool) -> None:
    """Replaces the tf.Variable of a moving statistic by one with a value of each replica."""
    value, local = private.value_of(variable), _local(synchronized)
    if value is None or all(getattr(value, name) == each for name, each in local.items()):
        return
    with tf.init_scope():
        name = value.name.partition(":")[0]
        made = tf.Variable(tf.convert_to_tensor(value), dtype=value.dtype, name=name, **local)
    private.set_value(variable, made)
