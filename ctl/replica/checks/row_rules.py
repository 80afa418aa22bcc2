"""Applies the rules of the ops that are known to compute a row of a batch from that row alone."""

from collections.abc import Callable
from typing import Any

from ctl.replica.checks import row_arithmetic, row_layout, row_ops
from ctl.replica.checks.row_place import CombinesRows, Rows, States

Rule = Callable[[Any, States, int | None], Rows | list[Rows | None]]
_IDENTITIES = ("Identity", "IdentityN", "StopGradient", "PreventGradient")


def apply(op: Any, states: States, count: int | None) -> list[Rows | None] | None:
    """Returns where the outputs of an op hold the rows.

    Args:
        op: the op, at least one of whose inputs depends on the batch.
        states: where each input holds the rows; None for an input that does not depend on the batch.
        count: the number of rows; None if it is known only when the step runs.

    Returns:
        One entry per output; None if the op combines rows, or is not known.
    """
    rule = _RULES.get(op.type)
    listed = any(state is not None and state.listed for state in states)
    if rule is None or (listed and not op.type.startswith("TensorList")):
        return list(states) if op.type in _IDENTITIES else None
    try:
        result = rule(op, states, count)
    # This covers ops with attributes or shapes that their rules do not expect.
    except (CombinesRows, AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError):
        return None
    return result if isinstance(result, list) else [result] * len(op.outputs)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(row_ops.ELEMENTWISE, row_arithmetic.elementwise),
    **dict.fromkeys(row_ops.LEADING_AXIS, row_arithmetic.leading),
    **dict.fromkeys(row_ops.TRAILING_AXES, row_arithmetic.trailing),
    **dict.fromkeys(row_ops.REDUCTIONS, row_arithmetic.reduction),
    **dict.fromkeys(row_ops.SCANS, row_arithmetic.scan),
    **dict.fromkeys(
        ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), row_arithmetic.matmul
    ),
    **dict.fromkeys(
        ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), row_arithmetic.fused_batch_norm
    ),
    "ConcatV2": row_layout.concat,
    **dict.fromkeys(("Split", "SplitV"), row_layout.split),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), row_layout.pad),
    **dict.fromkeys(("GatherV2", "ResourceGather", "Gather"), row_layout.gather),
    **dict.fromkeys(("GatherNd", "ResourceGatherNd"), row_layout.gather_nd),
    **dict.fromkeys(("SpaceToBatchND", "BatchToSpaceND"), row_arithmetic.space_to_batch),
    **dict.fromkeys(("LookupTableFind", "LookupTableFindV2"), row_arithmetic.lookup),
    **dict.fromkeys(("TensorListGetItem", "TensorListStack"), row_arithmetic.list_item),
    **dict.fromkeys(("TensorListSetItem", "TensorListPushBack"), row_arithmetic.list_set),
    "TensorListFromTensor": row_arithmetic.list_from_tensor,
    "TensorListPopBack": row_arithmetic.list_pop,
    "TensorListResize": row_arithmetic.list_same,
    "BroadcastTo": row_layout.broadcast,
    "CudnnRNNV3": row_arithmetic.cudnn,
    "Einsum": row_arithmetic.einsum,
    "ExpandDims": row_layout.expand_dims,
    "IdentityN": row_arithmetic.identities,
    "OneHot": row_arithmetic.one_hot,
    "Pack": row_layout.pack,
    "Reshape": row_layout.reshape,
    "ReverseV2": row_arithmetic.scan,
    "Roll": row_arithmetic.roll,
    "Select": row_arithmetic.select,
    "Slice": row_layout.slice,
    "Squeeze": row_layout.squeeze,
    "StridedSlice": row_layout.strided_slice,
    "Tile": row_layout.tile,
    "Transpose": row_layout.transpose,
    "Unpack": row_layout.unpack,
}
