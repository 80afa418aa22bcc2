"""Rejects losses that depend on the number of rows that a replica or a micro-batch has.

Such a loss is divided twice, and the first divisor depends on the split. In the trace of a step that
number is a constant, so the losses of a trace with any number of rows are searched.
"""

import contextlib

import numpy as np
import tensorflow as tf

from ctl.built.built_step import BuiltStep
from ctl.built.observers import Losses, Observer, TraceAgain
from ctl.checks import loss_trace, users_code
from ctl.checks.probe_error import ProbeError
from ctl.checks.read_batches import ReadBatch
from ctl.checks.row_flow import Mixed, RowFlow, is_statistics
from ctl.checks.row_rules import Place
from ctl.checks.searched_trace import ACCEPT, reject_if_split
from ctl.errors import UsageError
from ctl.graphs import ops
from ctl.graphs.dataflow import ancestors
from ctl.rows.trace import Trace, symbolic
from ctl.update.microbatches import row_count

# Ops that turn an integer into a number of a loss, or into a condition.
_NUMBERS = ("Cast", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual")
_SIZES = ("Shape", "ShapeN", "Size")
_REPEATS = ("BroadcastTo", "Fill", "OnesLike", "Tile", "ZerosLike")  # one number for each row
# How code reads a static number of rows.
_STATIC = r"shape(\.dims|\.as_list\(\)|\(\))?\[0\]|static_value|as_list\(\)"


class RowCount(Observer):
    """Computes the losses of the first batch with and without its last row."""

    @classmethod
    def check_losses(
        cls, step: BuiltStep, losses: Losses | None, trace_again: TraceAgain | None, name: str
    ) -> None:
        """Raises a UsageError if losses depend on the number of rows of a replica or micro-batch."""
        plan, fewer, count = step.plan, None, 0
        if plan.options.allow_row_coupling:
            return
        # The code may compute something else if no number of rows is known while it is traced.
        is_static = losses is None or users_code.names(step, _STATIC)
        if is_static and trace_again:
            with contextlib.suppress(Exception):  # the step reports it
                batch, mask = step.first_batch()
                count = row_count(batch) if mask is None else int(tf.math.count_nonzero(mask))
                losses, fewer = trace_again(count), trace_again(count - 1)  # or none of them
        if losses is None:
            return
        try:
            check_count(losses, step.first_batch, name=name, split=plan.is_split, fewer=fewer)
        except UsageError:
            # A counter in Python computes other losses in each trace, which the step reports.
            one, two = (trace_again(count) if fewer and trace_again else losses for _ in range(2))
            compared = (one.values, one.trace.inputs, two.values, two.trace.inputs)
            if loss_trace.compare(*compared) is None:
                raise


def check_count(
    losses: Losses, read_batch: ReadBatch, *, name: str, split: bool, fewer: Losses | None = None
) -> None:
    """Computes losses that contain a number of rows, for the first batch with and without its last row.

    Args:
        losses: the losses in a graph in which the number of rows is not known; or, with `fewer`, in
            one for the rows of the first batch.
        read_batch: returns the first batch of a replica, like the tensors of the trace, and its mask.
        name: the user's loss function, for the message.
        split: whether the batch is split. If not, a warning is logged.
        fewer: the losses of one row less, if they require a static number of rows.

    Raises:
        UsageError: the loss of a row depends on the number of rows.
    """
    # A row may depend on the rows of all replicas, and so on their number.
    if losses.trace.global_values:
        return
    values = [*losses.values, *losses.weights]
    if fewer is None and not any(_counts_rows(each, losses.trace) for each in values):
        return

    from ctl.checks.row_probe import Probe, find_dependent  # for losses with a number of rows

    # Statistics may depend on the number of rows, also those of rows that are drawn at random.
    statistics = [x.op for x in ancestors(*losses.values) if is_statistics(x.op)]
    probe = Probe(values, losses.trace, statistics=statistics)
    dropped = probe
    if fewer:
        statistics = [x.op for x in ancestors(*fewer.values) if is_statistics(x.op)]
        of_fewer = [*fewer.values, *fewer.weights]
        dropped = Probe(of_fewer, fewer.trace, statistics=statistics)
    try:
        depends_on_number = find_dependent(probe, [read_batch], None, dropped=dropped)
        # A loss that depends on the other rows is rejected by `search`, with a message of its own.
        if not depends_on_number or find_dependent(probe, [read_batch], None):
            return
    except ProbeError:  # it is not known
        return
    is_weight = all(i >= len(losses.values) for i in depends_on_number)
    name, what, one = (
        ("sample_weight", "weights", "weight") if is_weight else (name, "losses", "loss")
    )
    line = (
        f"{name} returns {what} that depend on the number of rows of a replica or micro-batch, so the "
        f"update depends on how the batch is split: return the {one} of each row, since ctl divides "
        f"by the weight of the global batch, {ACCEPT}."
    )
    reject_if_split(line, split=split)


def _counts_rows(losses: tf.Tensor, trace: Trace) -> bool:
    """Returns whether losses perhaps contain a number of rows, as a float, or a sum over rows."""
    flow = RowFlow({id(x): Place(0) for x in symbolic(trace.inputs)}, count=None)
    if isinstance(flow.state(losses), Mixed):
        return True
    # A shape that is used as a shape remains an integer, and a sum of equal numbers is their number.
    stack, seen = [(losses, False, False)], set()
    while stack:
        tensor, is_cast, is_summed = stack.pop()
        key = (id(tensor), is_cast, is_summed)
        if key in seen or not hasattr(tensor, "op"):
            continue
        seen.add(key)
        op = tensor.op
        # Draws are keyed by the places of rows, and statistics are kept as they are.
        if ops.KEYED_BITS in op.name or is_statistics(op):
            continue
        if (is_cast and op.type in _SIZES) or (is_summed and op.type in _REPEATS):
            return True
        if op.type in ops.FUNCTIONS and any(
            x.type in (*_SIZES, "OnesLike") for x in ops.with_called([op])
        ):
            return True
        is_cast |= op.type in _NUMBERS and op.inputs[0].dtype.is_integer
        axes = tf.get_static_value(op.inputs[1]) if op.type == "Sum" else ()
        is_summed |= axes is None or 0 in np.ravel(axes)
        stack += [(x, is_cast, is_summed) for x in op.inputs]
    return False
