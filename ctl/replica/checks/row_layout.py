"""Rules for ops that move values, as in `row_arithmetic`: one per op."""

from collections.abc import Sequence
import math
import os
from typing import Any

from ctl.replica.checks.row_place import (
    CombinesRows,
    Rows,
    States,
    align,
    check,
    first,
    only,
    rank_of,
    same_place,
    single,
    static,
)

# The files of functions that fold axes, and how many frames deep their reshapes are.
_LIBRARY_FUNCTIONS = (
    os.path.join("tensorflow", "python", "ops", "math_ops.py"),
    os.path.join("tensorflow", "python", "ops", "nn_ops.py"),
    os.path.join("tf_keras", "src", "layers", "normalization", "layer_normalization.py"),
)
_DEPTH = 10


def transpose(op: Any, states: States, count: int | None) -> Rows:
    """Reorders axes."""
    state = first(states)
    order = static(op.inputs[1]).tolist()
    return state._replace(axis=order.index(state.axis))


def reshape(op: Any, states: States, count: int | None) -> Rows:
    """Changes the sizes of axes; the sizes before and after the rows identify their axis."""
    state = first(states)
    old, new = op.inputs[0].shape, op.outputs[0].shape
    check(old.rank is not None and new.rank is not None)
    is_first = state.outer == 1 and all(size == 1 for size in old[: state.axis])
    if count is None and is_first and _is_in_library_function(op):
        # Functions such as tf.tensordot fold the leading axes, and unfold them again.
        return state._replace(axis=next(i for i, size in enumerate([*new, None]) if size != 1))
    before = _product(old[: state.axis]) * state.outer
    after = _product(old[state.axis + 1 :]) * state.inner
    for axis in range(new.rank):
        check(all(size is not None for size in new[:axis]))
        outer = before / math.prod(new[:axis])
        rest = new[axis + 1 :]
        inner = after / _product(rest)
        if outer < 1:
            break
        exact = outer == int(outer) and inner == int(inner) and inner >= 1
        if exact and (count is None or new[axis] in (None, int(outer) * count * int(inner))):
            # With a size that is not static, a group of rows may be an axis too.
            check(count is not None or new[axis] is None)
            return Rows(axis, int(outer), int(inner))
    raise CombinesRows


def _is_in_library_function(op: Any) -> bool:
    frames = [frame.filename for frame in op.traceback[-_DEPTH:]]
    return any(name.endswith(_LIBRARY_FUNCTIONS) for name in frames)


def _product(sizes: Sequence[int | None]) -> int:
    check(None not in list(sizes) and 0 not in list(sizes))
    return math.prod(size or 1 for size in sizes)


def expand_dims(op: Any, states: States, count: int | None) -> Rows:
    """Inserts an axis."""
    state = first(states)
    axis = int(static(op.inputs[1]).flatten()[0]) % rank_of(op.outputs[0])
    return state._replace(axis=state.axis + (axis <= state.axis))


def squeeze(op: Any, states: States, count: int | None) -> Rows:
    """Removes axes of size 1."""
    state, shape = first(states), op.inputs[0].shape
    axes = [axis % rank_of(op.inputs[0]) for axis in op.get_attr("squeeze_dims")]
    axes = axes or [i for i, size in enumerate(shape) if size == 1 and i != state.axis]
    check(state.axis not in axes and rank_of(op.outputs[0]) == shape.rank - len(axes))
    return state._replace(axis=state.axis - sum(axis < state.axis for axis in axes))


def pack(op: Any, states: States, count: int | None) -> Rows:
    """Stacks tensors on a new axis."""
    state = same_place(op, states, count)
    axis = op.get_attr("axis") % rank_of(op.outputs[0])
    return state._replace(axis=state.axis + (axis <= state.axis))


def unpack(op: Any, states: States, count: int | None) -> Rows:
    """Unstacks an axis other than the axis of the rows."""
    state = first(states)
    axis = op.get_attr("axis") % rank_of(op.inputs[0])
    check(axis != state.axis)
    return state._replace(axis=state.axis - (axis < state.axis))


def concat(op: Any, states: States, count: int | None) -> Rows:
    """Concatenates tensors; on the axis of the rows, as blocks."""
    *tensors, axis = op.inputs
    axis = int(static(axis)) % rank_of(op.outputs[0])
    places = {s._replace(outer=1) if s.axis == axis else s for s in states if s is not None}
    state = single(places)
    if state.axis != axis:
        return state
    # Blocks on the axis of the rows; one that does not depend on the batch must fill its blocks.
    outer = 0
    for tensor, place in zip(tensors, states, strict=False):
        if place is None:
            place = _need_block(state, tensor.shape[axis], 0, count)
        outer += place.outer
    return state._replace(outer=outer)


def split(op: Any, states: States, count: int | None) -> Rows | list[Rows | None]:
    """Splits a tensor; on the axis of the rows, into blocks."""
    by_sizes = op.type == "SplitV"
    value, axis = (op.inputs[0], op.inputs[2]) if by_sizes else (op.inputs[1], op.inputs[0])
    state, axis = first(states), int(static(axis)) % rank_of(value)
    if axis != state.axis:
        return state
    parts = [_block(state, output.shape[axis], 0, count) for output in op.outputs]
    if None in parts:
        check(not by_sizes and state.outer % len(parts) == 0)
        return state._replace(outer=state.outer // len(parts))
    return parts


def _block(state: Rows, size: int | None, begin: int, count: int | None) -> Rows | None:
    """Returns the rows in a range of blocks; None if the range has incomplete blocks."""
    if size is None or count is None:
        return None
    unit = max(1, count) * state.inner
    if size == 0 or size % unit or begin % unit:
        return None
    return state._replace(outer=size // unit)


def _need_block(state: Rows, size: int | None, begin: int, count: int | None) -> Rows:
    return single({block for block in [_block(state, size, begin, count)] if block is not None})


def strided_slice(op: Any, states: States, count: int | None) -> Rows:
    """Slices axes; on the axis of the rows, only complete blocks."""
    tensor, state = op.inputs[0], only(states, 0)
    masks = {
        k: op.get_attr(f"{k}_mask") for k in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    items = op.inputs[3].shape[0]
    check(items is not None)
    rank = rank_of(tensor)
    source = target = 0
    for i in range(items):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            later = sum(1 for j in range(i + 1, items) if not masks["new_axis"] & (1 << j))
            skipped = rank - source - later
            if source <= state.axis < source + skipped:
                return state._replace(axis=target + state.axis - source)
            source, target = source + skipped, target + skipped
        elif masks["new_axis"] & bit:
            target += 1
        elif source == state.axis:
            check(not masks["shrink_axis"] & bit)
            both = bool(masks["begin"] & bit) and bool(masks["end"] & bit)
            return _slice_rows(op, state, i, target, both, count)
        else:
            source, target = source + 1, target + (not masks["shrink_axis"] & bit)
    return state._replace(axis=target + state.axis - source)


def _slice_rows(op: Any, state: Rows, i: int, target: int, both: bool, count: int | None) -> Rows:
    """Slices the axis of rows by the i-th item: everything, or complete blocks."""
    strides = static(op.inputs[3])
    check(int(strides[i]) == 1)
    old, new = op.inputs[0].shape[state.axis], op.outputs[0].shape[target]
    if both or (old is not None and old == new):
        return state._replace(axis=target)
    begin = 0 if op.get_attr("begin_mask") & (1 << i) else int(static(op.inputs[1])[i])
    check(old is not None)
    return _need_block(state, new, begin % (old or 1), count)._replace(axis=target)


def slice(op: Any, states: States, count: int | None) -> Rows:
    """Slices by begin and size."""
    state = only(states, 0)
    old, new = op.inputs[0].shape[state.axis], op.outputs[0].shape[state.axis]
    if old is not None and old == new:
        return state
    begin, size = (int(static(x)[state.axis]) for x in op.inputs[1:])
    if begin == 0 and size == -1:
        return state
    return _need_block(state, new, begin, count)


def pad(op: Any, states: States, count: int | None) -> Rows:
    """Pads axes other than the axis of the rows."""
    state = first(states)
    check(not static(op.inputs[1])[state.axis].any())
    return state


def tile(op: Any, states: States, count: int | None) -> Rows:
    """Repeats axes; on the axis of the rows, as blocks."""
    state = first(states)
    old, new = op.inputs[0].shape[state.axis], op.outputs[0].shape[state.axis]
    multiple = new // old if old and new else int(static(op.inputs[1])[state.axis])
    return state._replace(outer=state.outer * multiple)


def broadcast(op: Any, states: States, count: int | None) -> Rows:
    """Repeats axes of size 1."""
    return align(op, [states[0], *[None] * (len(states) - 1)], op.outputs[0].shape.rank)


def gather(op: Any, states: States, count: int | None) -> Rows:
    """Gathers entries of a table that does not depend on the batch, or of other axes."""
    params, indices = states[0], states[1]
    batch = op.get_attr("batch_dims")
    resource = op.type == "ResourceGather"
    axis = 0 if resource or op.type == "Gather" else int(static(op.inputs[2]))
    rank = rank_of(op.inputs[1])
    batch %= rank + 1
    axis = axis if resource or axis >= 0 else axis + rank_of(op.inputs[0])
    places = set()
    if params is not None:
        check(params.axis != axis)
        shift = rank - batch - 1 if params.axis > axis else 0
        places.add(params._replace(axis=params.axis + shift))
    if indices is not None:
        shift = axis - batch if indices.axis >= batch else 0
        places.add(indices._replace(axis=indices.axis + shift))
    return single(places)


def gather_nd(op: Any, states: States, count: int | None) -> Rows:
    """Gathers entries of a table by several indexes."""
    state = only(states, 1)
    check(state.axis < rank_of(op.inputs[1]) - 1)
    return state
