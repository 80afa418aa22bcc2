"""Detects variables that replicas assign from their own rows, and whose copies tf.distribute combines.

The copies are equal then, or are parts of a sum, so that comparing them shows nothing. But the mean of
the replicas' values, and the value of the first one, depend on how the batch is split.
"""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.built.observers import Observer
from ctl.built.state import assignable, state_of
from ctl.checks.graph_copier import FAILURES, ProbeError, has_mask
from ctl.checks.read_batches import read_values
from ctl.checks.row_probe import Probe
from ctl.configs.error_location import user_frame
from ctl.errors import UsageError
from ctl.graphs import ops
from ctl.graphs.assignments import Assignment, find_assignments, read_handles
from ctl.graphs.dataflow import ancestors, captured
from ctl.graphs.places import is_in_replica
from ctl.rows.row_mask import Rows
from ctl.rows.trace import Trace, symbolic
from ctl.update.snapshot import handles

_SUM, _MEAN = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


class LocalState(Observer):
    """Searches what a training step assigns to the variables that its owner holds."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Raises a UsageError if a loss reads a value of a replica's rows; prints a line for others."""
        plan = self.step.plan
        is_accepted = plan.options.allow_row_coupling or rows.earlier is not None
        if is_accepted or plan.layout.replicas == 1:
            return
        updates = rows.trace.updates
        losses = [x for each in updates for part in each.micro_batches for x in part.losses]
        read = read_handles(*losses, *(x for each in updates for x in each.inputs))
        for assignment, v in self._find_local(operations, rows, read):
            place = place_of_value(assignment)
            line = (
                f"{place} assigns {v.name} a value of the rows of each replica, which depends on how "
                "the batch is split: compute it from those of all, by ctl.replica.all_gather(rows), or "
                "accept it with allow_row_coupling=True (runtime.allow_row_coupling)."
            )
            # The mean of means over equal numbers of rows is that of all rows. A tensor that one replica
            # has left on an object is assigned as it is.
            is_mean = v.aggregation == _MEAN and not any(
                is_in_replica(x.op) for x in _values(assignment)
            )
            if handles([v]) & read and not (plan.even and is_mean):
                raise UsageError(line)
            self.warn_once(line)

    def _find_local(
        self, operations: Sequence[Any], rows: Rows, read: set[int]
    ) -> Iterator[tuple[Assignment, tf.Variable]]:
        """Yields the assignments of values that depend on the split, with their variables."""
        held = assignable(self.step.attributes)
        # The statistics of batch normalizations are left out, but not the sums of metrics.
        variables = [*held.once, *(v for v in held.summed if v.aggregation == _SUM)]
        owners = {key: v for v in variables for key in handles([v])}
        for assignment in find_assignments(operations):
            v, values = owners.get(id(assignment.handle)), _values(assignment)
            if v is None or not _is_local(values, rows):
                continue
            if not (_is_right(v, values, read) and self._is_right_sum(v, values, rows)):
                yield assignment, v

    def _is_right_sum(self, variable: tf.Variable, values: Sequence[Any], rows: Rows) -> bool:
        """Returns whether a variable that is no metric gets a sum over rows, if its parts are summed."""
        is_state = any(variable is each for each in state_of(self.step.attributes))
        if variable.aggregation != _SUM or not is_state:
            return True
        traces = traces_of(rows)
        numbers = symbolic([rows.first_row, rows.step])
        first = {id(x): np.zeros([], x.dtype.as_numpy_dtype) for x in numbers}
        # The sum of the parts is computed from the batches of all replicas of the process.
        probe = Probe(values, Trace([each.inputs for each in traces]), first)
        with contextlib.suppress(ProbeError, *FAILURES), tf.init_scope():
            size = symbolic(rows.trace.inputs)[0].shape[0]
            batch, labels = read_values(rows.trace, self.step.first_batch, size, least=2)
            width, every = len(batch), batch * len(traces)
            masks = [*range(width - 1, len(every), width)] if has_mask(rows.trace) else []
            by_place = any(ops.KEYED_BITS in x.op.name for x in ancestors(*values))
            by_place |= rows.micro_batches > 1  # a micro-batch has only some of the rows
            return probe.is_sum_of_rows(
                every, labels * len(traces), masks=None if by_place else masks
            )
        return True


def _is_right(variable: tf.Variable, values: Sequence[Any], read: set[int]) -> bool:
    """Returns whether a value of its own rows on each replica becomes one of the global batch."""
    is_own = variable.synchronization == tf.VariableSynchronization.ON_READ
    if variable.aggregation == _SUM:
        # A sum of local sums is right, unless a replica reads its own part of it, or the variable is in
        # the value, which counts it once for each replica.
        return not handles([variable]) & (read if is_own else read_handles(*values))
    # Other copies that are not combined may differ, so that they are compared.
    return variable.aggregation not in (_FIRST, *(() if is_own else (_MEAN,)))


def place_of_value(assignment: Assignment) -> str:
    """Names the user's line of an assignment, or of a value: the replicas merge to assign it."""
    values = ancestors(*_values(assignment))
    stacks = ([(f.filename, f.lineno) for f in x.op.traceback] for x in values)
    return next(filter(None, map(user_frame, stacks)), assignment.place)


def _values(assignment: Assignment) -> list[tf.Tensor]:
    return [x for x in assignment.op.inputs if x.dtype != tf.resource]


def _is_local(values: Sequence[Any], rows: Rows) -> bool:
    """Returns whether tensors depend on the rows of a replica, other than by a collective."""
    inputs = {id(x) for x in symbolic(rows.trace.inputs)}
    # Of all replicas of the process, whose values tf.distribute combines.
    clean = {id(x.output) for trace in traces_of(rows) for x in trace.global_values}
    return any(
        id(x) in inputs
        # An argument of a function, such as that of a program of XLA.
        or (x.op.type == "Placeholder" and x.graph is not rows.graph and captured(x) is None)
        for x in ancestors(*values, stop=clean)
    )


def traces_of(rows: Rows) -> list[Trace]:
    """Returns the traces of all replicas of the process."""
    return getattr(rows.graph, "_ctl_started", [rows.trace])
