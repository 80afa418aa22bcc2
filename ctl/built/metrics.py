"""Checks the metrics of a trainer, and reports their results.

A metric is a function of the evaluated rows alone if its variables are sums over rows: each replica
sums its own rows, and tf.distribute sums the replicas when the result is read.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import contextlib
import functools
import inspect
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.data.autograph import convert
from ctl.data.source import Batch
from ctl.errors import UsageError, did_you_mean, type_name
from ctl.keras import models
from ctl.rows import row_mask
from ctl.rows.trace import MetricUpdate
from ctl.update.plan import Plan


def prepare(
    metrics: object, weighted: Sequence[str] | None = None
) -> dict[str, tf_keras.metrics.Metric]:
    """Checks the result of `build_metrics`, and makes `results` skip metrics that nothing updates.

    Args:
        metrics: name -> metric.
        weighted: the names of those that are weighted as the loss; None if the user has not chosen.

    Returns:
        The metrics.

    Raises:
        UsageError: a value is not a metric of tf_keras that keeps its state in variables.
    """
    if not isinstance(metrics, Mapping):
        raise UsageError(
            f"build_metrics returned {type_name(metrics)}, but must return a dict of name -> metric."
        )
    metrics = {name: models.convert(metric) for name, metric in metrics.items()}
    for name in weighted or ():
        if name not in metrics:
            raise UsageError(
                f"weighted_metrics names {name!r}, which is no metric{did_you_mean(name, metrics)}"
            )
    for name, metric in metrics.items():
        if isinstance(metric, type):
            raise UsageError(f"Metric {name!r} is a class: call it, {metric.__name__}().")
        models.check(metric, f"Metric {name!r} is")
        if not isinstance(metric, tf_keras.metrics.Metric):
            shown = repr(metric) if isinstance(metric, str) else type_name(metric)
            raise UsageError(
                f"Metric {name!r} is {shown}, but must be a metric of tf_keras.metrics: write the "
                "class, such as tf_keras.metrics.MeanAbsoluteError(), or wrap a function that returns "
                "one value per row by tf_keras.metrics.MeanMetricWrapper."
            )
        if isinstance(metric, tf_keras.metrics.experimental.PyMetric):
            raise UsageError(
                f"Metric {name!r} is a PyMetric, whose state in Python is not summed over replicas: "
                "write a tf_keras.metrics.Metric that creates its state by add_weight."
            )
        kind, base = type(metric), tf_keras.metrics.Metric
        shapes = [variable.shape for variable in metric.variables if variable.shape.rank]
        resets = (kind.reset_state, kind.reset_states) != (base.reset_state, base.reset_states)
        if shapes and not resets:
            raise UsageError(
                f"Metric {name!r} has a variable of shape {shapes[0]}, but the reset_state of tf_keras "
                "resets scalars only: override reset_state, such as by v.assign(tf.zeros_like(v)) for "
                "each variable v."
            )
        _wrap_update(metric, name)
    weight(metrics, weighted)
    return metrics


def weight(
    metrics: Mapping[str, tf_keras.metrics.Metric], weighted: Collection[str] | None
) -> None:
    """Notes which metrics get the weights of the loss; None if the user has not chosen."""
    for name, metric in metrics.items():
        metric._ctl_weighted = None if weighted is None else name in weighted


def check_names(metrics: Iterable[str], plan: Plan) -> None:
    """Raises UsageError if a metric has the name of another value that is reported."""
    reported = {
        f"{loss}_loss": f"the loss {loss!r} of loss_weights" for loss in plan.options.loss_weights
    }
    reported["examples"] = "the number of examples"
    if plan.has_loss or not plan.own_train_step:
        reported["loss"] = "the loss"
    for name in sorted({*metrics} & {*reported}):
        raise UsageError(
            f"build_metrics returned a metric {name!r}, but ctl reports {reported[name]} by this name: "
            "choose another name."
        )


def results(metrics: Mapping[str, tf_keras.metrics.Metric]) -> dict[str, tf.Tensor]:
    """Returns the results of the metrics, without those that nothing has updated."""
    return {name: metric.result() for name, metric in metrics.items() if _is_updated(metric)}


def call(
    update: Callable[..., None], metrics: Any, batch: Batch, outputs: Any, weights: Any
) -> None:
    """Calls a user's `update_metrics`, and notes its updates in the trace."""
    rows = row_mask.current() or row_mask.Rows()
    rows.trace.metric_rows = outputs, weights
    try:
        convert(update)(metrics, batch, outputs, weights)
    finally:
        rows.trace.metric_rows = None


def _wrap_update(metric: tf_keras.metrics.Metric, name: str) -> None:
    """Makes a metric note that its `update_state` was called, even if only by a trace.

    It also explains the error of a metric whose variables would get the shape of an unknown batch.
    """
    update_state, metric._ctl_name = metric.update_state, name

    # Without `__module__`, by which AutoGraph decides what to convert.
    @functools.wraps(update_state, assigned=("__name__", "__doc__"))
    def record(*args: Any, **arguments: Any) -> Any:
        metric._ctl_updated = True
        _note_update(metric, args, arguments)
        try:
            return update_state(*args, **arguments)
        except ValueError as error:
            if "partially known TensorShape" not in str(error):
                raise
            raise UsageError(
                f"Metric {name!r} takes the shape of its variables from its first update, in which the "
                "number of rows is not known: update it with values without that axis, or give the "
                "shape, such as tf_keras.metrics.MeanTensor(shape=[10])."
            ) from error

    metric.update_state = record


def _note_update(
    metric: tf_keras.metrics.Metric, args: tuple[Any, ...], arguments: Mapping[str, Any]
) -> None:
    """Notes an update in the trace of the `update_metrics` that calls it."""
    rows = row_mask.current()
    if rows is None or rows.trace.metric_rows is None:
        return
    function = type(metric).update_state
    signature = inspect.signature(getattr(function, "python_function", function))
    with contextlib.suppress(TypeError):  # the update itself will raise it
        given = {**signature.bind(metric, *args, **arguments).arguments}
        given |= given.pop("kwargs", {})
        # The first argument is the metric itself.
        weight, values = given.pop("sample_weight", None), list(given.values())[1:]
        rows.trace.metric_updates.append(
            MetricUpdate(metric, values, weight, *rows.trace.metric_rows)
        )


def _is_updated(metric: tf_keras.metrics.Metric) -> bool:
    # A user's own code may assign the variables without update_state.
    return getattr(metric, "_ctl_updated", False) or any(
        np.any(v.numpy()) for v in metric.variables
    )
