"""Metrics that the layers of a model hold and update in `call`, or make by `add_metric`.

In a step they get the rows that exist, as the metrics of `build_metrics` do.
"""

import functools
import logging
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.graphs import dataflow
from ctl.keras.private import base_layer_utils
from ctl.rows import row_mask

_LOG = logging.getLogger("ctl")


def prepare(model: tf_keras.Model, seed: int, *, scope: str) -> None:
    """Makes the metrics of a model's layers count the rows that exist; may be called again."""
    for layer in model._flatten_layers():
        for metric in layer._metrics:
            if not hasattr(metric, "_ctl_layer"):
                metric._ctl_layer = layer.name
                _wrap_update(metric)


def _wrap_update(metric: tf_keras.metrics.Metric) -> None:
    update_state = metric.update_state

    # Without `__module__`, by which AutoGraph decides what to convert.
    @functools.wraps(update_state, assigned=("__name__", "__doc__"))
    def update(*args: Any, **kwargs: Any) -> Any:
        rows = row_mask.current()
        if rows is None:
            return update_state(*args, **kwargs)
        tensors = [v for v in tf.nest.flatten((args, kwargs)) if tf.is_symbolic_tensor(v)]
        has_rows = any(_has_rows(value, rows) for value in tensors)
        if not has_rows and _is_split(rows) and any(map(dataflow.depends_on_batch, tensors)):
            args = _averaged(metric, args, rows)
            if not args:
                return None
        args, kwargs = _existing((args, kwargs), rows)
        try:
            return update_state(*args, **kwargs)
        except ValueError as error:
            shapes = [v.shape for v in tf.nest.flatten((args, kwargs)) if tf.is_symbolic_tensor(v)]
            if isinstance(error, UsageError) or len(shapes) < 2:
                raise
            raise UsageError(
                f"Metric {metric.name!r} of layer {metric._ctl_layer} cannot be updated with the shapes "
                f"{' and '.join(map(str, shapes))}: pass one value and one weight per row."
            ) from error

    metric.update_state = update


def create(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Creates a metric of tf_keras that layers may update while a model is built in a strategy's scope.

    Nothing is computed then, but tf_keras raises an error: there is no replica whose rows it could add.
    """
    metric = original(cls, *args, **kwargs)
    update_state = metric.update_state

    @functools.wraps(update_state, assigned=("__name__", "__doc__"))
    def update(*args: Any, **kwargs: Any) -> Any:
        is_called = base_layer_utils.call_context().in_call
        if is_called and tf.distribute.in_cross_replica_context():
            return None
        return update_state(*args, **kwargs)

    metric.update_state = update
    return metric


def _has_rows(value: tf.Tensor, rows: row_mask.Rows) -> bool:
    """Returns whether axis 0 is that of the rows, as far as their number is static."""
    if not value.shape.rank:
        return False
    count = rows.count if isinstance(rows.count, int) else None
    return value.shape[0] == count and dataflow.holds_rows(value)


def _is_split(rows: row_mask.Rows) -> bool:
    """Returns whether these rows may not be all rows of the batch, or contain padding."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return replicas > 1 or bool(rows.isolated) or rows.row_mask is not None


def _averaged(metric: tf_keras.metrics.Metric, args: Any, rows: row_mask.Rows) -> tuple[Any, ...]:
    """Returns the values of which a layer computed the mean; nothing, with a warning, if it did not."""
    if type(metric) is tf_keras.metrics.Mean and len(args) == 1 and args[0].op.type == "Mean":
        values = args[0].op.inputs[0]
        if _has_rows(values, rows):
            return (values,)
    if not hasattr(metric, "_ctl_warned"):
        metric._ctl_warned = True
        _LOG.warning(
            "Metric %r of layer %s is not reported: its value combines the rows of one replica, and ctl "
            "does not know how. Pass it one value per row, without a reduction of axis 0.",
            metric.name,
            metric._ctl_layer,
        )
    return ()


def _existing(values: Any, rows: row_mask.Rows) -> Any:
    """Returns the rows that exist of the tensors that have rows."""
    if rows.row_mask is None:
        return values
    mask = tf.not_equal(rows.row_mask, tf.zeros([], rows.row_mask.dtype))
    indices = tf.where(mask)[:, 0]
    return tf.nest.map_structure(
        lambda v: tf.gather(v, indices) if tf.is_tensor(v) and _has_rows(v, rows) else v, values
    )
