"""Checks the metrics of a trainer, updates them with a replica's rows, and reports their results.

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
from ctl.private.tf_keras import compile_utils, losses_utils
from ctl.replica.arithmetic import loss, models, row_mask
from ctl.replica.arithmetic.trace import MetricUpdate
from ctl.replica.step import observers
from ctl.replica.step.plan import Plan


def prepare(
    metrics: Any, weighted: Sequence[str] | None = None
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


def results(metrics: Mapping[str, tf_keras.metrics.Metric]) -> dict[str, Any]:
    """Returns the results of the metrics, without those that nothing has updated."""
    return {name: metric.result() for name, metric in metrics.items() if _is_updated(metric)}


def creates_variables_late(metric: tf_keras.metrics.Metric) -> bool:
    """Returns whether the first update of a metric will create its variables, as in F1Score."""
    return not (metric.built and getattr(metric, "_built", True))


def update_by_name(
    metrics: Mapping[str, tf_keras.metrics.Metric],
    batch: Batch,
    outputs: Any,
    weights: tf.Tensor | None,
    sample_weight: Callable[..., Any],
) -> None:
    """Updates every metric by `update`; with a dict of labels, each by the target that it is named by.

    Args:
        metrics: name -> metric. With a dict of labels, a name is that of a target, or begins with it,
            as "age_error" with "age", and the target's outputs have the same name.
        batch: its "label" is [rows, ...], or a dict of them.
        outputs: the outputs of `forward`.
        weights: the mask of the rows that exist.
        sample_weight: (training=) -> the weights of the losses, for metrics that are weighted by them.

    Raises:
        UsageError: a metric has no target or no outputs, or does not accept them.
    """
    if metrics and "label" not in batch:
        raise UsageError('The batch has no "label": override update_metrics.')
    labels = batch.get("label")
    for name, metric in metrics.items():
        own = _weights_of(metric, name, weights, sample_weight)
        if not isinstance(labels, Mapping):
            update(metric, labels, outputs, own, name=name)
            continue
        both = [k for k in labels if isinstance(outputs, Mapping) and k in outputs]
        target = _target(name, both)
        if target is None:
            raise UsageError(
                f"Metric {name!r} is named by none of the targets that have outputs of the same name "
                f"({', '.join(both) or 'none'}; the labels are {', '.join(labels)}): call it "
                f"'{next(iter(labels))}_{name}', for example, and return a dict from the model, or "
                "override update_metrics."
            )
        update(metric, labels[target], outputs[target], own, name=name)


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


def _target(name: str, targets: Iterable[str]) -> str | None:
    """Returns the target that a metric is named by."""
    return max((k for k in targets if f"{name}_".startswith(f"{k}_")), key=len, default=None)


def _weights_of(
    metric: Any, name: str, weights: Any, sample_weight: Callable[..., Any]
) -> tf.Tensor | None:
    """Returns the weights of a metric: the mask of the rows, or its product with the loss' weights."""
    if not getattr(metric, "_ctl_weighted", False):
        return weights
    rows = row_mask.current()
    training = rows is None or rows.earlier is None
    own = sample_weight(training=training)
    if isinstance(own, Mapping):
        target = _target(name, own)
        if target is None:
            raise UsageError(
                f"Metric {name!r} of weighted_metrics is named by none of the losses that have weights "
                f"({', '.join(own)}): call it '{next(iter(own))}_{name}', or override update_metrics."
            )
        own = own[target]
    return loss.row_weights(own, weights, tf.as_dtype(tf_keras.backend.floatx()))


def update(
    metric: tf_keras.metrics.Metric,
    labels: Any,
    outputs: Any,
    weights: tf.Tensor | None = None,
    *,
    name: str = "",
) -> None:
    """Updates a metric with the rows of one replica, as tf_keras' `compile` does.

        def update_metrics(self, metrics, batch, outputs, weights):
            ctl.replica.update_metric(metrics["accuracy"], batch["label"], outputs, weights)

    Labels [rows] get the rank of outputs [rows, 1], and a mask of the model's layers, for example of
    Embedding(mask_zero=True), is the sample weight.

    Args:
        metric: a metric with `update_state(labels, outputs)`.
        labels: [rows, ...].
        outputs: [rows, ...].
        weights: the `weights` of `update_metrics`, or their product with sample weights, [rows] or in
            the shape of the metric's values. Rows whose weights are all 0 are excluded, and the metric
            gets the others in their shape.
        name: the name of the metric in messages.

    Raises:
        UsageError: the metric does not accept these labels and outputs, or compares rows.
    """
    name = name or getattr(metric, "_ctl_name", metric.name)
    takes_weights = _takes_weights(metric, name)
    built_in = type(metric).__module__.startswith("tf_keras.")
    mask = losses_utils.get_mask(outputs)
    sample_weight = None
    if weights is not None:
        # Padding is removed, and not weighted by 0: R2Score counts rows of weight 0, AUC and F1Score
        # reject [rows] weights for some shapes, and a user's metric may ignore weights.
        if weights.shape.rank == 2 and weights.shape[1] == 1:
            weights = weights[:, 0]  # F1Score would multiply all pairs of rows
        is_row = tf.not_equal(weights, tf.zeros([], weights.dtype))
        rows = tf.where(tf.reduce_any(is_row, axis=list(range(1, weights.shape.rank))))[:, 0]
        values = (labels, outputs, mask, weights)
        labels, outputs, mask, selected = tf.nest.map_structure(
            lambda value: None if value is None else tf.gather(value, rows), values
        )
        sample_weight = None if _is_mask(weights) else selected
    several = tf.nest.is_nested(labels) or tf.nest.is_nested(outputs)
    if several and built_in:
        raise UsageError(
            f"Metric {name!r} requires one tensor of labels and one of outputs, but the labels are "
            f"{type_name(labels)} and the outputs {type_name(outputs)}: override update_metrics, and "
            "call ctl.replica.update_metric(metric, labels, outputs, weights) for each output."
        )
    if not several:
        if built_in and outputs.shape.rank == 1:
            # The functions of tf_keras reduce the last axis, which here would hold the rows.
            outputs = tf.expand_dims(outputs, -1)
        # Without the weights, whose rank it would change, too.
        labels, outputs, _ = compile_utils.match_dtype_and_rank(labels, outputs, None)
        if sample_weight is not None and outputs.dtype.is_floating:
            sample_weight = tf.cast(sample_weight, outputs.dtype)
        sample_weight = losses_utils.apply_mask(outputs, sample_weight, mask)
        checked = {"labels": labels, "outputs": outputs}
        if takes_weights and sample_weight is not None:
            checked["sample_weight"] = sample_weight
        for observer in observers.load():
            observer.check_metric(metric, checked, name)
    arguments = {"sample_weight": sample_weight} if takes_weights else {}
    if sample_weight is not None and not takes_weights:
        raise UsageError(
            f"Metric {name!r} has no argument sample_weight, but the rows have weights or a mask: add "
            "the argument to its update_state."
        )
    if built_in:
        _update_built_in(metric, labels, outputs, arguments, name)
    else:
        _update_if_any(
            functools.partial(metric.update_state, labels, outputs, **arguments), outputs
        )


def _is_mask(weights: Any) -> bool:
    """Returns whether weights are the mask of the rows that exist, or a cast of it."""
    mask = row_mask.current_mask()
    while weights is not mask and hasattr(weights, "graph"):  # an eager tensor has none
        if weights.op.type not in ("Cast", "Identity"):
            return False
        weights = weights.op.inputs[0]
    return weights is mask


def masks_of(outputs: Any) -> list[tf.Tensor | None]:
    """Returns the mask that tf_keras attached to each of the outputs, or None."""
    return [losses_utils.get_mask(output) for output in tf.nest.flatten(outputs)]


def attach_masks(outputs: Any, masks: list[tf.Tensor | None]) -> None:
    """Attaches masks to outputs that a compiled function has returned without their attributes."""
    for output, mask in zip(tf.nest.flatten(outputs), masks, strict=True):
        if mask is not None:
            output._keras_mask = mask


def _takes_weights(metric: tf_keras.metrics.Metric, name: str) -> bool:
    """Returns whether `update_state` has an argument `sample_weight`, after the labels and outputs."""
    function = type(metric).update_state
    signature = inspect.signature(getattr(function, "python_function", function))
    keywords = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    takes_weights = keywords or "sample_weight" in signature.parameters
    try:
        signature.bind(metric, None, None, **({"sample_weight": None} if takes_weights else {}))
    except TypeError:
        raise UsageError(
            f"Metric {name!r} is {type_name(metric)}, whose update_state does not take labels and "
            f"outputs: override update_metrics, and call metrics[{name!r}].update_state(values, "
            "weights) with what it averages."
        ) from None
    return takes_weights


def _update_built_in(
    metric: tf_keras.metrics.Metric, labels: Any, outputs: Any, arguments: dict[str, Any], name: str
) -> None:
    try:
        metric.update_state(labels, outputs, **arguments)
    except UsageError:
        raise
    except (TypeError, ValueError, RuntimeError, tf.errors.OpError) as error:
        # AutoGraph puts the traceback before the message.
        reason = (str(error).strip().splitlines() or [""])[-1].strip()
        values = {"labels": labels, "outputs": outputs, **arguments}
        described = " and ".join(
            f"{kind} {value.dtype.name} {value.shape}"
            for kind, value in values.items()
            if value is not None
        )
        raise UsageError(
            f"Metric {name!r} does not accept {described} ({reason}): convert them in preprocess or "
            "forward, or override update_metrics."
        ) from error


def _update_if_any(update_state: Any, outputs: Any) -> None:
    """Calls `update_state` unless there are no rows, for which a user's metric may return NaN."""
    first = tf.nest.flatten(outputs)[0]
    if first.shape[0]:
        update_state()
        return

    def call() -> None:
        # tf_keras reads the last operation of the graph, and an update may have none.
        tf.no_op()
        update_state()

    tf.cond(tf.shape(first)[0] > 0, call, lambda: None)


def _wrap_update(metric: Any, name: str) -> None:
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


def _note_update(metric: Any, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
    """Notes an update in the trace of the `update_metrics` that calls it."""
    rows = row_mask.current()
    if rows is None or rows.trace.metric_rows is None:
        return
    function = type(metric).update_state
    signature = inspect.signature(getattr(function, "python_function", function))
    with contextlib.suppress(TypeError):  # the update itself will raise it
        given = {**signature.bind(metric, *args, **arguments).arguments}
        given |= given.pop("kwargs", {})
        weight, values = given.pop("sample_weight", None), list(given.values())[1:]
        rows.trace.metric_updates.append(
            MetricUpdate(metric, values, weight, *rows.trace.metric_rows)
        )


def _is_updated(metric: Any) -> bool:
    # A user's own code may assign the variables without update_state.
    return getattr(metric, "_ctl_updated", False) or any(
        np.any(v.numpy()) for v in metric.variables
    )
