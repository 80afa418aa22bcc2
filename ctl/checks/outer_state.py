"""Names what the user's code assigns outside of a step from rows of the replicas, if losses read it.

A loop of the user's own may compute a number from the rows, such as by `strategy.run` in a `train_step`,
and assign it to a variable. It is not part of the step, which is compared with one replica.
"""

from collections.abc import Sequence
from typing import Any

from ctl.built.observers import Observer
from ctl.checks.local_state import place_of_value
from ctl.graphs.assignments import find_assignments, read_handles
from ctl.graphs.dataflow import ancestors
from ctl.rows.row_mask import Rows
from ctl.rows.trace import symbolic

_DATA = ("IteratorGetNext", "MultiDeviceIteratorGetNextFromShard")


class OuterState(Observer):
    """Searches the code around a training step, as far as it is in the same function."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Prints a line for each assignment before the step, and after the loop for those behind it."""
        if rows.earlier is None and not self.step.plan.options.allow_row_coupling:
            graph: Any = rows.graph
            graph._ctl_inside = getattr(graph, "_ctl_inside", set()) | {id(x) for x in operations}
            self._name_assigned(rows)
            self.step.late.append(lambda: self._name_assigned(rows))

    def _name_assigned(self, rows: Rows) -> None:
        graph: Any = rows.graph
        inputs = {id(x) for x in symbolic(rows.trace.inputs)}
        losses = [x for each in rows.trace.updates for y in each.micro_batches for x in y.losses]
        read = read_handles(*losses, *(x for each in rows.trace.updates for x in each.inputs))
        for each in find_assignments(graph.get_operations()):
            if id(each.handle) not in read or id(each.op) in graph._ctl_inside:
                continue
            if any(id(x) in inputs or x.op.type in _DATA for x in ancestors(*each.op.inputs)):
                self.warn_once(
                    f"{place_of_value(each)} assigns outside of the step what its losses read, from "
                    "rows of the replicas, and only `ctl check` tests whether the update depends on how "
                    "the batch is split: assign it in the step, from ctl.replica.all_gather(rows)."
                )
