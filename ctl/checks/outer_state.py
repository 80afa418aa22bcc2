"""Names what the user's code computes from the rows of a replica outside of a step that reads it.

A loop of the user's own may compute a number from the rows, such as by `strategy.run` in a `train_step`,
and assign it to a variable, or change the rows by it. It is not part of the step, which is compared with
one replica.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from ctl.built.observers import Observer
from ctl.checks import loss_trace, suspects
from ctl.checks.local_state import place_of_value, traces_of
from ctl.checks.probe_error import ProbeError
from ctl.checks.row_flow import RowFlow
from ctl.checks.row_probe import Probe, find_dependent
from ctl.checks.row_rules import Place
from ctl.graphs import ops
from ctl.graphs.assignments import find_assignments, read_handles
from ctl.graphs.dataflow import ancestors, captured
from ctl.graphs.places import place_of
from ctl.rows.row_mask import Rows
from ctl.rows.trace import Trace, symbolic
from ctl.update.snapshot import handles
from ctl.version import FOLDER

_DATA = ("IteratorGetNext", "MultiDeviceIteratorGetNextFromShard")


class OuterState(Observer):
    """Searches the code around a training step, as far as it is in the same function."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Prints a line for each assignment before the step, and after the loop for those behind it."""
        plan = self.step.plan  # one replica has all rows around its micro-batches
        is_split = plan.layout.replicas > 1 and not plan.options.allow_row_coupling
        if is_split and rows.earlier is None:
            graph: Any = rows.graph
            graph._ctl_inside = getattr(graph, "_ctl_inside", set()) | {id(x) for x in operations}
            if rows.trace.call.setdefault("outer", rows.trace) is rows.trace:  # the first replica
                self._name_changed(rows)
            self._name_assigned(rows)
            self.step.late.append(lambda: self._name_assigned(rows))

    def _name_changed(self, rows: Rows) -> None:
        """Prints a line if the batch of the step has what the code has combined from rows."""
        inputs = symbolic(rows.trace.inputs)
        batch = [x for x in ancestors(*inputs) if _is_batch(x)]
        changed = [x for x in inputs if not any(x is each for each in batch)]
        for place, what in self._find_reasons(changed, batch) if changed else ():
            self.warn_once(
                f"{place} {what} before the step gets the rows, and only `ctl check` tests whether the "
                "update depends on how the batch is split: do it in the step (preprocess of a trainer, "
                "forward of a ctl.Step), which ctl tests."
            )
            return

    def _find_reasons(
        self, inputs: Sequence[tf.Tensor], batch: Sequence[tf.Tensor]
    ) -> Iterator[tuple[str, str]]:
        """Yields places that may change the rows by something that depends on the split, and what."""
        reached = [*ancestors(*inputs, stop={id(x) for x in batch})]
        own = str(FOLDER)
        users = [x.op for x in reached if not suspects.caller_of(x.op).startswith(own)]
        if not (users and batch):  # ctl has read the batch
            return
        for x in reached:
            if x.op.type in ops.RANDOM and ops.KEYED_BITS not in x.op.name:
                yield place_of(x.op), f"draws random numbers ({x.op.type})"
        if any(loss_trace.is_replica_number(x.op) for x in reached):
            yield place_of(users[0]), "uses the number of the replica"
        rows = batch[0].shape[0]
        for x in filter(suspects.is_count, reached):
            if _static_value(x.op.inputs[0]) == rows and (
                rows or _depends_on_others(inputs, batch, drops=True)
            ):
                yield place_of(x.op), "may use the number of rows of a replica"
        flow = RowFlow({id(x): Place(0) for x in batch}, count=inputs[0].shape[0])
        found = [op for _, op in flow.suspects(inputs) if suspects.is_users(op)]
        if flow.statistics or _depends_on_others(inputs, batch):
            for op in (*flow.statistics, *found, *users):
                yield place_of(op), f"may combine rows of a replica ({op.type})"

    def _name_assigned(self, rows: Rows) -> None:
        graph: Any = rows.graph
        inputs = {id(x) for x in symbolic(rows.trace.inputs)}
        of_all = {id(x.output) for each in traces_of(rows) for x in each.global_values}
        rates = [each.learning_rate for each in self.step.attributes.optimizers()]
        losses = [x for each in rows.trace.updates for y in each.micro_batches for x in y.losses]
        read = read_handles(*losses, *(x for each in rows.trace.updates for x in each.inputs))
        read |= handles([each for each in rates if isinstance(each, tf.Variable)])
        for each in find_assignments(graph.get_operations()):
            if id(each.handle) not in read or id(each.op) in graph._ctl_inside:
                continue
            if any(
                id(x) in inputs or _is_batch(x) for x in ancestors(*each.op.inputs, stop=of_all)
            ):
                self.warn_once(
                    f"{place_of_value(each)} assigns outside of the step what its updates read, from "
                    "rows of the replicas, and only `ctl check` tests whether the update depends on how "
                    "the batch is split: assign it in the step, from ctl.replica.all_gather(rows)."
                )


def _is_batch(tensor: Any) -> bool:
    """Returns whether a tensor is one of a batch, or an argument of the function of a loop."""
    op = tensor.op
    if tensor.dtype in (tf.resource, tf.variant):
        return False
    is_argument = op.type == "Placeholder" and captured(tensor) is None and tensor.shape.rank
    # Of an iterator whose last batch may be smaller.
    is_optional = any(x.type == "OptionalGetValue" for x in ops.with_called([op]))
    return op.type in _DATA or is_optional or bool(is_argument)


def _static_value(number: tf.Tensor) -> int | None:
    """Returns an integer that the graph shows, which may be an axis of a static shape."""
    value = tf.get_static_value(number)
    if value is None and number.op.type == "StridedSlice":
        shape, begin = (tf.get_static_value(x) for x in number.op.inputs[:2])
        value = None if shape is None or begin is None else shape[begin[0]]
    return None if value is None else int(value)


def _depends_on_others(
    inputs: Sequence[tf.Tensor], batch: Sequence[tf.Tensor], *, drops: bool = False
) -> bool:
    """Returns whether rows depend on other ones, or on their places, or whether that is not known.

    Args:
        inputs: the rows.
        batch: what they are computed from.
        drops: whether to leave a row out, in place of changing it.
    """

    def no_batch() -> Any:
        raise ValueError("the batches of a function of the user cannot be read")

    probe = Probe(inputs, Trace(batch), positions=[])
    count, dropped = (None, probe) if drops else (batch[0].shape[0], None)
    try:
        return bool(find_dependent(probe, [no_batch], count, dropped=dropped) or probe.by_place)
    except ProbeError:
        return not drops
