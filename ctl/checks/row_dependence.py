"""Rejects values of a row that depend on other rows, or on the place of the row in its replica."""

from collections.abc import Mapping, Sequence
import contextlib
from typing import Any

import tensorflow as tf

from ctl.checks.probe_error import ProbeError
from ctl.checks.read_batches import ReadBatch
from ctl.checks.row_flow import RowFlow
from ctl.checks.row_probe import Probe, find_dependent
from ctl.checks.row_rules import Place
from ctl.checks.searched_trace import COMBINES, FIX, PLACE_FIX, SearchedTrace, reject
from ctl.checks.suspects import find_number
from ctl.errors import UsageError
from ctl.graphs import ops
from ctl.graphs.dataflow import ancestors
from ctl.graphs.places import place_of
from ctl.rows.trace import Trace, UpdateTrace
from ctl.update import loss

_OUTPUTS = "outputs"  # what is computed from variables


class RowDependence:
    """The search of values that are computed from the same rows.

    Args:
        searched: the trace.
        update: the update that the values belong to.
        flow: finds where rows are combined.
        values: the values, one per row.
        suspects: those that perhaps depend on other rows, each with the op that combines them.
        count: the number of rows of the values; None if the trace accepts any number.
        micro_batches: the number of micro-batches that compute the values.

    Attributes:
        suspects: see above.
        probe: computes the suspects.
    """

    def __init__(
        self,
        searched: SearchedTrace,
        update: UpdateTrace,
        flow: RowFlow,
        values: Sequence[tf.Tensor],
        suspects: Sequence[tuple[tf.Tensor, Any]],
        count: int | None,
        *,
        micro_batches: int,
    ):
        self.searched, self.update, self.flow, self.count = searched, update, flow, count
        self._micro_batches = micro_batches
        self._is_split = searched.replicas * micro_batches > 1
        self.suspects = suspects
        self._is_numbered = find_number(searched, values) is not None
        self.probe = self._probe([value for value, _ in suspects])

    def run(self) -> bool:
        """Raises a UsageError, or warns if the batch is not split, if the rows affect each other.

        Returns:
            Whether no suspect has shown that it depends on other rows.
        """
        if self._examine(self.searched.batches):
            return False

        def examine_again(batches: Sequence[ReadBatch]) -> None:
            with contextlib.suppress(ProbeError):  # such as a batch of one row, which shows nothing
                self._examine(batches)

        self.searched.again.append(examine_again)
        return self._is_split

    def is_dependent(self, tensor: tf.Tensor) -> bool | None:
        """Returns whether the entry of a row depends on other rows; None if that is not seen."""
        with contextlib.suppress(ProbeError):
            if tensor.shape[:1].is_compatible_with([self.count]):
                probe = self._probe([tensor])
                found = bool(self._dependent(probe, self.searched.batches))
                return found if found or not probe.constant else None
        return None

    def _probe(self, values: Sequence[tf.Tensor]) -> Probe:
        searched = self.searched
        # Places that the user has computed from the number of the replica are compared elsewhere.
        positions = (
            None if searched.allow_unkeyed or self._is_numbered else searched.trace.positions
        )
        return Probe(
            values, searched.trace, searched.first, self.update.aliases, self.flow.statistics,
            positions,
        )  # fmt: skip

    def _dependent(self, probe: Probe, batches: Sequence[ReadBatch]) -> dict[int, bool]:
        """Returns the positions of dependent values -> whether they depend on the place only."""
        others = find_dependent(probe, batches, self.count, self._micro_batches)
        return {i: i not in others for i in sorted(others | probe.by_place)}

    def _examine(self, batches: Sequence[ReadBatch]) -> bool:
        op = self.suspects[0][1]
        try:
            found = self._dependent(self.probe, batches)
        except ProbeError as error:
            error.op = op
            if error.counts:  # such as by tf.boolean_mask; the step would report it later
                raise UsageError(loss.OTHER_COUNT.format(*error.counts)) from error
            raise
        if not found:
            return False
        position, by_place = next(iter(found.items()))
        # The first suspect may be harmless: what it computes shows that.
        known = self.flow
        with contextlib.suppress(ProbeError):
            known = self.flow.without_suspects(
                lambda values: [values[i] for i in self._dependent(self._probe(values), batches)]
            )
            op = getattr(known.state(self.probe.values[position]), "op", op)
        if by_place:
            use = f"uses the place of a row among the rows of its replica ({op.type})"
            fix = PLACE_FIX
        else:
            use, fix = f"{COMBINES} ({_describe_op(self.searched.trace, known, op)})", FIX
        reject(place_of(op), use, fix, split=self._is_split)
        return True


def _describe_op(trace: Trace, flow: RowFlow, op: Any) -> str:
    """Names an op that combines rows, with the shapes that it broadcasts.

    Raises:
        UsageError: it combines labels [rows] and outputs [rows, 1], which is wrong on any split.
    """
    if op.type == "ConcatV2":
        return (
            "ConcatV2; for two views of each row, call the model once for each view, or use "
            "tf.repeat(x, 2, axis=0)"
        )
    operands = [x for x in op.inputs if isinstance(flow.state(x), Place)]
    if op.type not in ops.ELEMENTWISE or len(operands) != 2:
        return op.type
    shown = " and ".join(f"{_describe(x, trace)} {tuple(x.shape)}" for x in operands)
    low, high = sorted(operands, key=lambda x: x.shape.rank)
    is_pair = [_describe(x, trace) for x in operands].count(_OUTPUTS) == 1 and high.shape[-1] == 1
    if not is_pair or low.shape.rank == high.shape.rank or _inserts_axis(high):
        return f"{op.type} of {shown}"  # such as x[:, None] - x, the differences of all pairs
    fix = f"use {_describe(high, trace)}[{':, ' * (high.shape.rank - 1)}0]"
    raise UsageError(
        f"{place_of(op)}: {shown} broadcast to {tuple(op.outputs[0].shape)} ({op.type}), so "
        f"each row meets the other rows: {fix}."
    )


def _inserts_axis(tensor: tf.Tensor) -> bool:
    """Returns whether an op before a tensor, other than elementwise ones, keeps or inserts an axis."""
    op = tensor.op
    if op.type in ops.ELEMENTWISE:
        return any(_inserts_axis(x) for x in op.inputs if x.shape.rank == tensor.shape.rank)
    names = {"StridedSlice": "new_axis_mask", "Sum": "keep_dims", "Mean": "keep_dims"}
    inserts = op.type in names and op.get_attr(names[op.type])
    return bool(inserts) or op.type in ("ExpandDims", "Reshape")


def _describe(tensor: tf.Tensor, trace: Trace) -> str:
    """Names the origin of a tensor: the model, or an entry of the batch."""
    sources = list(ancestors(tensor))
    if any(x.op.type in ("ReadVariableOp", "ResourceGather") for x in sources):
        return _OUTPUTS
    batch = trace.inputs[0] if isinstance(trace.inputs, tuple) else trace.inputs
    entries = {id(x): name for name, x in batch.items()} if isinstance(batch, Mapping) else {}
    names = {entries[id(x)] for x in sources if id(x) in entries}
    return f'batch["{names.pop()}"]' if len(names) == 1 else "data"
