"""Detects metrics in a user's code that are not sums over rows, or count other rows than the loss."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.built.observers import Observer
from ctl.checks.loss_trace import is_replica_number
from ctl.data.autograph import convert, traced
from ctl.errors import UsageError, list_some
from ctl.graphs.assignments import READS, Assignment, find_assignments, outermost
from ctl.graphs.dataflow import ancestors, depends_on_batch
from ctl.keras.private import losses_utils
from ctl.rows.row_mask import Rows
from ctl.rows.trace import MetricUpdate, symbolic
from ctl.update.snapshot import handles

_SUM = tf.VariableAggregation.SUM
_ROWS = 7919  # a number of rows that no other axis has, to recognize the axes of rows


class MetricRows(Observer):
    """Checks the metrics that a step or an evaluation updates."""

    @classmethod
    def check_metric(cls, metric: Any, values: Mapping[str, tf.Tensor], name: str) -> None:
        """Raises a UsageError if a metric is not a sum over rows."""
        check_rows(metric, values, name)

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Prints a line if `update_metrics` counts padding, or no metric has the weights of tokens."""
        updates = [
            update
            for update in rows.trace.metric_updates
            if all(x.graph is rows.graph for x in symbolic([*update.values, update.sample_weight]))
        ]
        averaged = {u.metric._ctl_name for u in updates if self._averages_rows(u, rows)}
        padded = {u.metric._ctl_name for u in updates if _counts_padding(u)} - averaged
        if padded:
            self.warn_once(
                f"update_metrics updates {list_some(sorted(padded))} without its argument weights, so "
                "that rows of padding are counted: pass it on, or call "
                "ctl.replica.update_metric(metric, labels, outputs, weights)."
            )
        numbered = {u.metric._ctl_name for u in updates if self._uses_replica_number(u, rows)}
        if numbered:
            self.warn_once(
                f"update_metrics passes {list_some(sorted(numbered))} values that contain the number of "
                "the replica, so that the metric depends on how the batch is split: leave the number "
                "out, or use ctl.replica.positions(x), the places of the rows in the global batch."
            )
        if averaged:
            self.warn_once(
                f"update_metrics gives {list_some(sorted(averaged))} one number for all rows of a "
                "replica. Unless it is the mean of equally many rows on all of them, the metric depends "
                "on how the batch is split: pass the values of the rows with weights, or sums to a "
                "tf_keras.metrics.Sum."
            )
        replaced = _find_replaced(operations, updates)
        if replaced and self.step.plan.layout.replicas > 1:
            self.warn_once(
                f"{list_some(replaced)} assigns a variable another value than a sum with it, such as a "
                "maximum, but ctl adds the variables of the replicas: write the metric with sums "
                "(assign_add), or compute it from collected outputs (collect_outputs)."
            )
        unweighted = _find_unweighted(updates, rows.trace.weights)
        if unweighted:
            self.warn_once(
                "sample_weight weights each token of the losses, but no metric: "
                f"{list_some(unweighted)} counts all tokens. Name the metrics that are to be weighted "
                f"in weighted_metrics, such as {unweighted[:1]}, or none of them: []."
            )

    def _uses_replica_number(self, update: MetricUpdate, rows: Rows) -> bool:
        """Returns whether values that a metric gets contain it, other than in ctl's positions."""
        trace = rows.trace
        known = [*trace.positions, *(each.output for each in trace.global_values)]
        known += [part.first_row for each in trace.updates for part in each.micro_batches]
        known = symbolic([known, rows.first_row, rows.row_mask, update.outputs])
        values = symbolic([*update.values, update.sample_weight])
        sources = ancestors(*values, stop={id(x) for x in known})
        replicas = self.step.plan.layout.replicas
        return replicas > 1 and any(is_replica_number(x.op) for x in sources)

    def _averages_rows(self, update: MetricUpdate, rows: Rows) -> bool:
        """Returns whether a metric gets a number that combines rows, but is no sum, without a weight."""
        plan, metric = self.step.plan, update.metric
        if not plan.is_split or update.sample_weight is not None:
            return False
        # The mean of the means of equally many rows is that of all rows.
        is_even = plan.even and rows.earlier is None and isinstance(metric, tf_keras.metrics.Mean)
        right = "Mean" if is_even else "Sum" if isinstance(metric, tf_keras.metrics.Sum) else ""
        of_all = {id(x.output) for x in rows.trace.global_values}
        inputs = {id(x) for x in symbolic(rows.trace.inputs)}
        numbers = [
            x for x in symbolic(update.values) if x.shape.rank == 0 and _reduction(x) != right
        ]
        sources = ancestors(*numbers, through_shapes=False, stop=of_all)
        return any(id(x) in inputs for x in sources)


def _reduction(value: tf.Tensor) -> str:
    """Returns the type of the op that makes a number, before it is cast or reshaped."""
    while value.op.type in ("Cast", "Identity", "Reshape", "Squeeze"):
        value = value.op.inputs[0]
    return str(value.op.type)


def _counts_padding(update: MetricUpdate) -> bool:
    """Returns whether a metric gets values of rows that do not depend on which rows exist."""
    values = symbolic([*update.values, update.sample_weight])
    if update.row_mask is None:
        return False
    # The outputs may depend on the mask, such as by batch normalization, with or without padding.
    outputs = {id(x) for x in symbolic(update.outputs)}
    uses_mask = any(x is update.row_mask for x in ancestors(*values, stop=outputs))
    # An output without an axis of rows is what forward made of its rows, with or without the mask.
    values = [x for x in values if x.shape.rank != 0 or id(x) not in outputs]
    return not uses_mask and any(map(depends_on_batch, values))


def _find_replaced(operations: Sequence[Any], updates: Sequence[MetricUpdate]) -> list[str]:
    """Names the user's metrics that assign something else than a sum to what the replicas add."""
    own = [*{id(u.metric): u.metric for u in updates}.values()]
    own = [m for m in own if type(m).__module__.partition(".")[0] not in ("keras", "tf_keras")]
    sums = [(m, v) for m in own for v in m.variables if v.aggregation == _SUM]
    owners = {key: metric._ctl_name for metric, v in sums for key in handles([v])}
    return sorted(
        {
            owners[id(each.handle)]
            for each in find_assignments(operations)
            if id(each.handle) in owners and each.op.type == "AssignVariableOp" and not _adds(each)
        }
    )


def _adds(assignment: Assignment) -> bool:
    """Returns whether an assigned value is a sum with the variable; ctl itself selects an old value."""
    op = assignment.op.inputs[1].op
    reads = [x for x in op.inputs if x.op.type in READS]
    is_sum = any(outermost(x.op.inputs[0]) is assignment.handle for x in reads)
    return op.type.startswith("Select") or (op.type.startswith(("Add", "Sub")) and is_sum)


def _find_unweighted(updates: Sequence[MetricUpdate], weights: Sequence[tf.Tensor]) -> list[str]:
    """Names the metrics of tokens if the tokens of the loss have weights and no metric has them."""
    tokens = [
        w
        for w in weights
        # Weights that depend on shapes alone are all equal.
        if {*w.shape[1:].as_list()} - {1} and depends_on_batch(w, through_shapes=False)
    ]
    chosen = any(update.metric._ctl_weighted is not None for update in updates)
    if chosen or any(getattr(u.sample_weight, "shape", [])[1:] for u in updates):
        return []
    names = {
        update.metric._ctl_name
        for update in updates
        for value in symbolic(update.values)[:1]  # the labels
        if any(value.shape[1 : w.shape.rank].is_compatible_with(w.shape[1:]) for w in tokens)
    }
    return sorted(names)


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
