"""Warns of reductions over the rows that a loss contains, although no batch shows that it needs them."""

from collections.abc import Mapping, Sequence
import contextlib
import logging
import os
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.checks.probe_error import FAILURES, ProbeError
from ctl.checks.row_dependence import RowDependence
from ctl.checks.row_flow import Mixed, RowFlow
from ctl.checks.row_probe import Probe
from ctl.checks.row_rules import Place
from ctl.checks.searched_trace import FIX
from ctl.graphs import ops
from ctl.graphs.dataflow import ancestors
from ctl.graphs.places import place_of

_LOG = logging.getLogger("ctl")
_REDUCTIONS = ("All", "Any", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum")
# Ops that only move rows, which later ops may put back.
_MOVING = (
    "BatchToSpaceND", "BroadcastTo", "ConcatV2", "DynamicPartition", "DynamicStitch", "ExpandDims",
    "GatherNd", "GatherV2", "Pack", "Pad", "PadV2", "Reshape", "ReverseV2", "Roll", "ScatterNd",
    "Slice", "SpaceToBatchND", "Split", "SplitV", "Squeeze", "StridedSlice", "TensorListFromTensor",
    "TensorListStack", "Tile", "Transpose", "Unique", "Unpack", "Where",
)  # fmt: skip
# What may hide a reduction in all batches.
_BOUNDS = (
    "Greater", "GreaterEqual", "Less", "LessEqual", "Maximum", "Minimum", "Relu", "Relu6",
)  # fmt: skip
_CTC = os.path.join("ops", "ctc_ops.py")  # its loops compute each row by itself
_MOST = 20  # reductions and bounds that are tried, each of which takes a trace


def warn(search: RowDependence) -> None:
    """Prints a line for the first op whose result would change the losses if it were another one.

    Args:
        search: the search, which has found no batch in which the losses depend on other rows.
    """
    flow, count = search.flow, search.count
    mixed = _find_mixed(search)
    reductions = [x for x, _ in mixed if _reduces(flow, x, count)]
    tried = [(x.op, x, [x], {}) for x in reductions] + _find_bounds(flow, mixed, count)
    for op, x, *shift in tried[:_MOST]:
        if search.is_dependent(x) is not False and _changes(search, *shift):
            return _warn(op, "reduces")
    # One alone may not show itself, such as a sum of 0 that is divided by one of 0.
    others = [
        x for x in reductions[:_MOST] if reductions[1:] and search.is_dependent(x) is not False
    ]
    if others[1:] and _changes(search, others, {}):
        return _warn(others[0].op, "reduces")
    # Rows that only move take part in the losses, as long as no later op moves them back.
    moved = [x for x, first in mixed if x.op is first and x.dtype.is_floating]
    for x in moved[:_MOST]:
        if search.is_dependent(x) and not _changes(search, [x], {}):
            return _warn(x.op, "moves")
    return None


def _find_mixed(search: RowDependence) -> list[tuple[tf.Tensor, Any]]:
    """Returns the numbers in which rows are perhaps combined, each with the op that did it first."""
    values = ancestors(*(value for value, _ in search.suspects))
    states = [(x, search.flow.state(x)) for x in values]
    return [
        (x, state.op) for x, state in states if isinstance(state, Mixed)
        # Otherwise it is a shape or an index, such as the largest length.
        and (not x.dtype.is_integer or any(each.type == "Cast" for each in x.consumers()))
    ]  # fmt: skip


def _changes(
    search: RowDependence, shifted: Sequence[tf.Tensor], bounds: Mapping[int, tf.Tensor]
) -> bool:
    """Returns whether other values of some tensors, or values without bounds, change the losses."""
    searched, values = search.searched, [value for value, _ in search.suspects]
    aliases = {**search.update.aliases, **bounds}
    statistics = search.flow.statistics
    other = Probe(values, searched.trace, searched.first, aliases, statistics, shifted=shifted)
    with contextlib.suppress(ProbeError, *FAILURES), tf.init_scope():
        return search.probe.is_changed_by(other, *searched.read(searched.batches[0]))
    return False


def _find_bounds(
    flow: RowFlow, mixed: Sequence[tuple[tf.Tensor, Any]], count: int | None
) -> list[Any]:
    """Returns the bounds that may hide a reduction: the op, its input, and what to change for it."""
    found: list[Any] = []
    for x, first in mixed:
        number = next((n for n in x.op.inputs if isinstance(flow.state(n), Mixed)), None)
        if number is not None and _bounds(first, x, count):
            is_bool = x.dtype.is_bool  # otherwise, the number without its bound
            found.append((first, number, [x] * is_bool, {} if is_bool else {id(x): number}))
    return found


def _warn(op: Any, use: str) -> None:
    _LOG.warning(
        "%s %s the rows of a replica or micro-batch (%s) for the loss. The loss of a row did not "
        "change with the other rows in any batch that ctl has tried; if it does in another one, the "
        "update depends on how the batch is split: %s.",
        place_of(op), use, op.type, FIX,
    )  # fmt: skip


def _reduces(flow: RowFlow, tensor: tf.Tensor, count: int | None) -> bool:
    """Returns whether an op computes numbers from several rows, as far as the ops show."""
    op, inputs = tensor.op, [flow.state(x) for x in tensor.op.inputs]
    mixed = [x for x in inputs if isinstance(x, Mixed)]
    if tensor.dtype == tf.variant or op.type in _MOVING:
        return False
    if op.type in ops.FUNCTIONS and any(x.filename.endswith(_CTC) for x in op.traceback):
        return False
    if op.type in ops.ELEMENTWISE:  # pairs of rows
        return not mixed and bool(tensor.shape.rank) and [*tensor.shape].count(count) > 1
    if op.type not in _REDUCTIONS:  # or a histogram, whose size is a maximum over the rows
        has_rows = any(isinstance(x, Place) for x in inputs)
        return not mixed or (has_rows and mixed[0].op.type not in _MOVING)
    return _is_over_rows(op, count, is_mixed=bool(mixed))


def _is_over_rows(op: Any, count: int | None, *, is_mixed: bool) -> bool:
    """Returns whether a reduction is perhaps over the axis of the rows."""
    axes = tf.get_static_value(op.inputs[1])
    if axes is None or not op.inputs[0].shape.rank:
        return True
    sizes = [op.inputs[0].shape[axis] for axis in np.ravel(axes)]
    # Inner axes, or sizes such as that of the samples of each row.
    is_inner = is_mixed and 0 not in np.ravel(axes)
    return not is_inner and not (count and all(size and size % count for size in sizes))


def _bounds(first: Any, tensor: tf.Tensor, count: int | None) -> bool:
    """Returns whether an op bounds a number of all rows, or compares it with a number.

    Whether there are rows at all, as of a mask, is compared with 0 or 1. If the `first` op that combined
    rows only moved them, an entry may be that of one row.
    """
    shape, is_bool = tensor.shape, tensor.dtype.is_bool
    may_have_rows = is_bool and shape.rank == 1 and first.type not in (*_MOVING, "TopKV2")
    is_number = shape.is_fully_defined() and all(size % (count or 1) for size in shape)
    constants = [tf.get_static_value(x) for x in tensor.op.inputs] if is_bool else []
    return (
        tensor.op.type in _BOUNDS and (is_number or (may_have_rows and shape.is_fully_defined()))
        and not any(x is not None and x in (0, 1) for x in constants if np.ndim(x) == 0)
    )  # fmt: skip
