"""Updates metrics with the rows of one replica, as tf_keras' `compile` does."""

from collections.abc import Callable, Iterable, Mapping
import functools
import inspect
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.built import observers
from ctl.data.source import Batch, Nest
from ctl.errors import UsageError, type_name
from ctl.keras.private import compile_utils, losses_utils
from ctl.rows import row_mask
from ctl.update import loss


def update_by_name(
    metrics: Mapping[str, tf_keras.metrics.Metric],
    batch: Batch,
    outputs: Nest,
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


def _target(name: str, targets: Iterable[str]) -> str | None:
    """Returns the target that a metric is named by."""
    return max((k for k in targets if f"{name}_".startswith(f"{k}_")), key=len, default=None)


def _weights_of(
    metric: tf_keras.metrics.Metric, name: str, weights: Any, sample_weight: Callable[..., Any]
) -> tf.Tensor | None:
    """Returns the weights of a metric: the mask of the rows, or its product with the loss' weights."""
    if not getattr(metric, "_ctl_weighted", False):
        return weights
    rows = row_mask.current()
    training = rows is None or rows.earlier is None  # set in evaluations
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


def _select_rows(weights: tf.Tensor, *values: Any) -> Any:
    """Returns the rows of values whose weights are not all 0, and their weights, or None for 1.

    Padding is removed, and not weighted by 0: R2Score counts rows of weight 0, AUC and F1Score reject
    [rows] weights for some shapes, and a user's metric may ignore weights.
    """
    if weights.shape.rank == 2 and weights.shape[1] == 1:
        weights = weights[:, 0]  # F1Score would multiply all pairs of rows
    is_row = tf.not_equal(weights, tf.zeros([], weights.dtype))
    rows = tf.where(tf.reduce_any(is_row, axis=list(range(1, weights.shape.rank))))[:, 0]
    values = (*values, None if _is_mask(weights) else weights)
    return tf.nest.map_structure(lambda v: None if v is None else tf.gather(v, rows), values)


def update(
    metric: tf_keras.metrics.Metric,
    labels: Nest,
    outputs: Nest,
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
        labels, outputs, mask, sample_weight = _select_rows(weights, labels, outputs, mask)
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
        for observer in observers.load(split=False):
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
    metric: tf_keras.metrics.Metric,
    labels: Nest,
    outputs: Nest,
    arguments: dict[str, Any],
    name: str,
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


def _update_if_any(update_state: Callable[[], None], outputs: Nest) -> None:
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
