"""Rejects penalties and gradients that are not sums of terms of single rows."""

from collections.abc import Sequence

import tensorflow as tf

from ctl.checks.graph_copier import has_mask
from ctl.checks.probe_error import ProbeError
from ctl.checks.read_batches import ReadBatch
from ctl.checks.row_flow import Mixed, RowFlow
from ctl.checks.row_probe import Probe
from ctl.checks.searched_trace import COMBINES, FIX, SearchedTrace, Suspect
from ctl.checks.suspects import is_users_gradient
from ctl.graphs import ops
from ctl.graphs.dataflow import ancestors
from ctl.graphs.places import place_of
from ctl.rows.trace import UpdateTrace, symbolic

_PENALTY_FIX = "return the penalty of each row from forward, and add it in per_example_loss"


def check_penalties(
    searched: SearchedTrace, update: UpdateTrace, flow: RowFlow, rows: int | None
) -> None:
    """Rejects penalties that depend on several rows at once, such as on pairs of them."""
    for penalty in update.penalties[0] if update.penalties else ():
        if rows == 1:
            raise ProbeError("a micro-batch has one row")
        op = getattr(flow.state(penalty), "op", penalty.op)
        use = f"{COMBINES} ({op.type})"
        _check(searched, update, flow, [penalty], place_of(op), use, _PENALTY_FIX)


def check_gradients(searched: SearchedTrace, update: UpdateTrace, flow: RowFlow) -> None:
    """Rejects gradients that depend on other rows than the losses show.

    Only where tf.stop_gradient gets what combines rows, or the user has written a gradient: to compute
    them takes longer.
    """
    # With one replica, the gradient of what is normalized or weighted depends on sums over its rows.
    is_alone = searched.replicas == 1 or searched.is_alone
    sums = [*flow.statistics, *searched.trace.weights] if is_alone else []
    plain = any(op.type.startswith("FusedBatchNorm") for op in flow.statistics)  # warned of
    if not update.gradients or sums or plain:
        return
    for tensor in ancestors(*update.micro_batches[0].losses):
        state, seen = flow.state(tensor), ""
        for op in ops.with_called([tensor.op]):
            if op.type == "StopGradient" and isinstance(state, Mixed):
                seen = ", as seen in the gradients beside tf.stop_gradient"
            elif is_users_gradient(op):
                seen = ", as seen in the gradient of tf.custom_gradient"
        if seen:
            dense = [getattr(x, "values", x) for x in update.gradients[0] if x is not None]
            op = state.op if isinstance(state, Mixed) else tensor.op
            use, masks = f"{COMBINES} ({op.type}){seen}", _masks(searched, flow, dense)
            if any(x.dtype.is_floating and x.dtype.size == 2 for x in ancestors(*dense)):
                # The sums of rows that are made up may differ by rounding, but hardly those of data.
                searched.suspects.append(Suspect(place_of(op), use, FIX))
            else:
                _check(searched, update, flow, dense, place_of(op), use, FIX, masks)
            return


def _check(
    searched: SearchedTrace, update: UpdateTrace, flow: RowFlow, values: Sequence[tf.Tensor],
    place: str, use: str, fix: str, masks: Sequence[int] | None = None,
) -> None:  # fmt: skip
    probe = Probe(values, searched.trace, searched.first, update.aliases, flow.statistics)

    def finds(batches: Sequence[ReadBatch]) -> bool:
        return not probe.is_sum_of_rows(*searched.read(batches[0]), masks=masks)

    searched.examine(finds, place, use, fix)


def _masks(
    searched: SearchedTrace, flow: RowFlow, values: Sequence[tf.Tensor]
) -> Sequence[int] | None:
    """Returns the masks for which gradients are sums, wherever rows are; None if this is not known."""
    trace, reached = searched.trace, list(ancestors(*values))
    # What rows of all replicas, statistics and draws that are keyed by places add stays in its place.
    of_all = {id(x.output) for x in trace.global_values if x.output.shape.rank != 0}
    by_place = any(id(x) in of_all or ops.KEYED_BITS in x.op.name for x in reached)
    # The gradients of one micro-batch have only its rows.
    if flow.statistics or by_place or searched.micro_batches > 1:
        return None
    return [len(symbolic(trace.inputs)) - 1] if has_mask(trace) else []
