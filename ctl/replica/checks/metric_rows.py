"""Detects metrics in a user's code that are not sums over rows, by the shapes of their tensors."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.data.autograph import convert, traced
from ctl.errors import UsageError
from ctl.private.tf_keras import losses_utils
from ctl.replica.step.observers import Observer

_ROWS = 7919  # a number of rows that no other axis has, to recognize the axes of rows


class MetricRows(Observer):
    """Checks the metrics that a step or an evaluation updates."""

    @classmethod
    def check_metric(cls, metric: Any, values: Mapping[str, tf.Tensor], name: str) -> None:
        """Raises a UsageError if a metric is not a sum over rows."""
        check_rows(metric, values, name)


def check_rows(metric: Any, values: Mapping[str, tf.Tensor], name: str) -> None:
    """Checks a metric that a user wrote, or the user's function in a MeanMetricWrapper.

    The code is traced and not run, which gives the shapes and adds nothing to the graph of the step.

    Args:
        metric: a metric.
        values: "labels", "outputs" and possibly "sample_weight" that `update_state` gets, [rows, ...].
        name: the name of the metric in messages.

    Raises:
        UsageError: it computes pairs of rows, or its function does not return values per row.
    """
    is_wrapper = isinstance(metric, tf_keras.metrics.MeanMetricWrapper)
    function = metric._fn if is_wrapper else type(metric)
    if (getattr(function, "__module__", None) or "").startswith("tf_keras."):
        return
    if values["labels"].shape.rank is None or values["outputs"].shape.rank is None:
        return

    def call(labels: tf.Tensor, outputs: tf.Tensor, **weights: tf.Tensor) -> Any:
        if not is_wrapper:
            metric.update_state(labels, outputs, **weights)
            return None
        labels, outputs = tf.cast(labels, metric.dtype), tf.cast(outputs, metric.dtype)
        outputs, labels = losses_utils.squeeze_or_expand_dimensions(outputs, labels)
        return convert(function)(labels, outputs, **metric._fn_kwargs)

    specs = {k: tf.TensorSpec([_ROWS, *v.shape[1:]], v.dtype) for k, v in values.items()}
    try:
        trace = traced(call).get_concrete_function(**specs)
    except Exception:  # the update itself will raise it, with the user's line
        return
    arguments = " and ".join(f"{kind} {_format(spec.shape)}" for kind, spec in specs.items())
    for operation in trace.graph.get_operations():
        for tensor in operation.outputs:
            if tensor.shape.rank and tensor.shape.as_list().count(_ROWS) > 1:
                raise UsageError(
                    f"Metric {name!r} compares all rows with each other (operation {operation.type} "
                    f"returns {_format(tensor.shape)}) for {arguments}: labels [rows] have the rank of "
                    "the outputs, as in tf_keras' compile, and weights keep theirs, so give values the "
                    "same rank, as by tf.reshape(labels, [-1])."
                )
    shape = trace.output_shapes
    if not is_wrapper or not isinstance(shape, tf.TensorShape) or shape.rank is None:
        return
    if not shape.rank or shape[0] not in (None, _ROWS):
        raise UsageError(
            f"The function of metric {name!r} returned shape {_format(shape)} for {arguments}, but must "
            "return [rows, ...]: do not reduce the axis of the rows."
        )


def _format(shape: tf.TensorShape) -> str:
    sizes = ("rows" if n == _ROWS else str(n) for n in shape.as_list())
    return f"[{', '.join(sizes)}]"
