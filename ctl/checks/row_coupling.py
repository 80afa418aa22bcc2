"""Rejects losses in which a row of the batch depends on other rows of its replica or micro-batch.

The ops from the batch to the losses are searched while the step is traced; nothing is added to the
graph. An op that may combine rows is a suspect. The losses are then computed with other rows exchanged,
before the first step, for batches of the whole epoch and for rows that are made up from them: if the
loss of a row changes, it is rejected. It must not change either if the replica begins one row later, as
it does on another split. The batches of steps 1, 2, 4, ... are computed in the same way, after these
steps. A trace with one row cannot show that, so the step is then traced again with several.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import functools
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.built.observers import Observer
from ctl.checks import (
    exchanged_rows,
    hidden_reductions,
    loss_trace,
    replica_number,
    row_sums,
)
from ctl.checks.graph_copier import ProbeError
from ctl.checks.read_batches import ReadBatch, read_existing
from ctl.checks.row_dependence import RowDependence
from ctl.checks.row_flow import RowFlow
from ctl.checks.row_rules import Place
from ctl.checks.searched_trace import ACCEPT, Check, SearchedTrace
from ctl.data.autograph import traced
from ctl.errors import UsageError
from ctl.graphs.dataflow import outer_tensor
from ctl.graphs.places import place_of
from ctl.rows import row_mask
from ctl.rows.row_mask import Rows
from ctl.rows.trace import Trace, UpdateTrace, symbolic

_LOG = logging.getLogger("ctl")
_PARTS = (0.25, 0.5, 0.75, 0.99)  # of the epoch, whose batches are read besides the next one
_ROWS = 4  # of a micro-batch, if the step is traced again
Compute = Callable[[Any], Any]


class RowCoupling(Observer):
    """Searches the losses of training steps."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Raises a UsageError if the loss of a row depends on other rows of the replica."""
        plan = self.step.plan
        if rows.earlier is None and not plan.options.allow_row_coupling:
            read = self.step.first_batch
            batches: list[ReadBatch] = [read, *(functools.partial(read, part) for part in _PARTS)]
            again = search(rows, plan.layout.replicas, batches, self.step.compute)
            self.step.repeated.extend(again)


def search(
    rows: Rows, replicas: int, batches: Sequence[ReadBatch], compute: Compute
) -> list[Check]:
    """Searches the losses that a replica has traced.

    Args:
        rows: the rows of the replica, with its trace.
        replicas: the number of replicas that compute the global batch.
        batches: see `SearchedTrace`.
        compute: what was traced, as a function of a batch.

    Returns:
        The checks to repeat for other batches, where the ops do not show that rows are independent.

    Raises:
        UsageError: the loss of a row depends on other rows of the replica, or the replicas compute
            different functions of their rows. The message names the user's line of code.
    """
    trace = rows.trace
    if not symbolic(trace.inputs):
        return []
    # On several replicas the first position is computed from the rows of all.
    numbers = symbolic([rows.first_row, rows.step])
    first = {id(x): np.zeros([], x.dtype.as_numpy_dtype) for x in numbers}
    trace.positions.extend(symbolic([rows.first_row]))
    context: Any = tf.distribute.get_replica_context()
    number = int(tf.get_static_value(context.replica_id_in_sync_group) or 0)
    found = SearchedTrace(
        trace, replicas, rows.micro_batches, batches, rows.allow_unkeyed, first, number
    )
    # The graph keeps the traces, because it also keeps their tensors.
    earlier = trace.call.get("searches", [])
    trace.call["searches"] = [*earlier, found]
    if earlier:  # another replica of this process, in the same graph
        difference, own = loss_trace.compare_replicas(earlier[0].trace, trace, len(earlier))
        _check_equal(difference, "replicas")
        if own is not None:
            for pair in zip(earlier[0].trace.updates, trace.updates, strict=False):
                replica_number.check(earlier[0], found, pair, own)
        return found.again
    try:
        _check_updates(found)
    except ProbeError as unknown:
        try:
            with tf.init_scope(), futures.ThreadPoolExecutor(1) as thread:  # in no strategy
                again = thread.submit(_check_again, rows, replicas, batches[0], compute)
                return again.result()
        except ProbeError as error:
            op = error.op or unknown.op
            if op is not None and found.is_split:
                _LOG.warning(
                    "%s may combine rows of the same replica or micro-batch (%s), which is not known: "
                    "%s. If it does, the update depends on how the batch is split, which `ctl check` "
                    "measures.",
                    place_of(op), op.type, error,
                )  # fmt: skip
    return found.again


def _check_again(rows: Rows, replicas: int, read_batch: ReadBatch, compute: Compute) -> list[Check]:
    """Checks the losses of a step that is traced again, with several rows in each micro-batch."""
    count = _ROWS * rows.micro_batches
    batch = tf.nest.map_structure(lambda x: x[:count], read_existing(read_batch, count, rows.trace))
    traces: list[Trace] = []

    def step(batch: Any) -> None:
        traces.append(trace := Trace(batch, losses_only=True))
        again = dataclasses.replace(
            rows, row_mask=None, first_row=tf.zeros([], tf.int64), step=0, count=count,
            graph=tf.compat.v1.get_default_graph(), single=False, trace=trace,
        )  # fmt: skip
        trace.positions.append(again.first_row)
        with row_mask.replay(again, {}), trace.record_collectives():
            compute(batch)

    try:
        traced(step).get_concrete_function(batch)
    # The code may require the number of rows that it has, or fail once the losses are known.
    except Exception as error:
        updates = [each for trace in traces for each in trace.updates if each.micro_batches]
        if len(updates) < len(rows.trace.updates):
            reason = f"the step cannot be traced with {_ROWS} rows ({type(error).__name__})"
            raise ProbeError(reason) from error
    read = [lambda: (batch, None)]
    found = SearchedTrace(
        traces[0], replicas, rows.micro_batches, read, rows.allow_unkeyed, is_alone=True
    )
    _check_updates(found)
    return found.again


def _check_updates(searched: SearchedTrace) -> None:
    """Raises a UsageError, or a ProbeError if the trace cannot show what the losses are."""
    for update in searched.trace.updates:
        _check_update(searched, update)
        if not loss_trace.has_equal_parts(update):
            raise ProbeError("no two micro-batches have the same number of rows")
    _check_equal(loss_trace.compare_micro_batches(searched.trace), "micro-batches")


def _check_update(searched: SearchedTrace, update: UpdateTrace) -> None:
    trace, micro_batches = searched.trace, searched.micro_batches
    tensors = symbolic(trace.inputs)
    positions = [x for x in trace.positions if x.shape.rank]
    batch = {id(x): Place(0) for x in (*tensors, *positions)}
    clean = [id(value.output) for value in trace.global_values]
    count = tensors[0].shape[0] if tensors[0].shape.rank else None

    def check_rows(flow: RowFlow, values: Any, count: int | None, micro_batches: int) -> None:
        search = RowDependence(
            searched, update, flow, values, count, micro_batches=micro_batches
        )  # fmt: skip
        if search.run():
            hidden_reductions.warn(search)

    # The undivided batch, up to what `preprocess` and `sample_weight` returned.
    prepared = RowFlow(batch, count=count, clean=clean, row_wise=trace.row_wise)
    check_rows(prepared, update.inputs, count, 1)

    part = update.micro_batches[0]
    leading = {id(x): Place(0) for x in part.rows if x.shape.rank}
    rows = part.size if isinstance(part.size, int) else None

    def resolve(tensor: tf.Tensor) -> tf.Tensor | None:
        alias = update.aliases.get(id(tensor))
        return outer_tensor(tensor) if alias is None else alias

    losses = RowFlow(
        {**batch, **leading}, count=rows, clean=clean, resolve=resolve, row_wise=trace.row_wise
    )
    check_rows(losses, part.losses, rows, micro_batches)
    if micro_batches > 1:  # those of `preprocess` have the rows of all micro-batches
        exchanged_rows.check(searched, update, prepared, update.inputs)
    exchanged_rows.check(searched, update, losses, part.losses, part.rows)
    row_sums.check_penalties(searched, update, losses, rows)
    row_sums.check_gradients(searched, update, losses)


def _check_equal(difference: loss_trace.TraceDifference | None, parts: str) -> None:
    if difference is None:
        return
    one, two = difference.values
    raise UsageError(
        f"{place_of(difference.op)} is {one} in one of the {parts} and {two} in another: "
        "code in Python, such as a counter, runs once for each of them, while the step is traced. Use "
        f"self.global_step, or a tf.Variable, {ACCEPT}."
    )
