"""Rejects state of a step that is no variable, such as a table, which all replicas share."""

from collections.abc import Sequence
from typing import Any

from ctl.built.observers import Observer
from ctl.errors import UsageError
from ctl.graphs import ops
from ctl.graphs.places import place_of
from ctl.rows.row_mask import Rows

# Ops that change a resource other than a variable, or read what others have left in it.
_RESOURCES = ("LookupTableImport", "LookupTableInsert", "LookupTableRemove", "Queue")


class SharedResources(Observer):
    """Searches the ops of training steps."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Raises a UsageError if a step changes a queue or a table; prints a line if it is not split."""
        plan = self.step.plan
        if plan.options.allow_row_coupling or rows.earlier is not None:
            return
        op = next((x for x in ops.with_called(operations) if x.type.startswith(_RESOURCES)), None)
        if op is None:
            return
        line = (
            f"{place_of(op)} changes a queue or a table ({op.type}), which all replicas and "
            "micro-batches share and no checkpoint has: keep its numbers in a tf.Variable, computed "
            "from ctl.replica.all_gather(rows), or accept it with allow_row_coupling=True "
            "(runtime.allow_row_coupling)."
        )
        if plan.is_split:
            raise UsageError(line)
        self.warn_once(line)
