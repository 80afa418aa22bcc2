"""Rules of the ops that compute a row of a batch from that row alone.

A rule gets the op, where its inputs hold the rows, and the number of rows if it is static. It returns
where all outputs, or each of them, hold the rows, and raises `CombinesRows` otherwise. The rules save
the time of the probe for large networks, so they cover the ops of convolutional networks and
Transformers. Any other op counts as one that combines rows, and is left to the probe.
"""

from collections.abc import Callable, Iterable, Sequence
import itertools
import math
import os
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl.graphs import ops


class Place(NamedTuple):
    """The place of the rows in a tensor in which each entry depends on one row only.

    Attributes:
        axis: the axis that holds the rows.
        inner: the number of consecutive entries of each row; [rows, time] folded into one axis has
            inner = time.
        views: the number of copies of the batch, one after the other, as of ctl.replica.views.
    """

    axis: int
    inner: int = 1
    views: int = 1


States = Sequence[Place | None]
RowRule = Callable[[Any, States, int | None], Place | list[Place | None]]


class CombinesRows(Exception):
    """An op combines several rows, or may do so."""


def apply(op: Any, states: States, count: int | None) -> list[Place | None] | None:
    """Returns where the outputs of an op hold the rows.

    Args:
        op: the op, at least one of whose inputs depends on the batch.
        states: where each input holds the rows; None for an input that does not depend on the batch.
        count: the number of rows; None if it is known only when the step runs.

    Returns:
        One entry per output; None if the op combines rows, or is not known.
    """
    try:
        result = _RULES[op.type](op, states, count)
    # This covers ops with attributes or shapes that their rules do not expect.
    except (CombinesRows, AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError):
        return None
    return result if isinstance(result, list) else [result] * len(op.outputs)


def _single(states: Iterable[Place | None]) -> Place:
    """Returns the place of the rows if all inputs that have some agree."""
    places = {state for state in states if state is not None}
    _check(len(places) == 1)
    return places.pop()


def _only(states: States, position: int) -> Place:
    """Returns the place in one input; the others must not depend on the batch."""
    _check(not any(states[:position]) and not any(states[position + 1 :]))
    return _single(states)


def _check(condition: bool) -> None:
    if not condition:
        raise CombinesRows


def _rank(tensor: tf.Tensor) -> int:
    return int(tensor.shape.rank)  # a TypeError if it is not known


def _static(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    _check(value is not None)
    return value


def _elementwise(op: Any, states: States, count: int | None) -> Place:
    """Aligns the inputs at their last axes."""
    return _single(
        state and state._replace(axis=state.axis + _rank(op.outputs[0]) - _rank(tensor))
        for tensor, state in zip(op.inputs, states, strict=True)
    )


def _leading(op: Any, states: States, count: int | None) -> Place:
    """Accepts rows on axis 0."""
    # A module of XLA is the fused attention, whose operands have the rows on axis 0.
    _check(op.type != "XlaCallModule" or b"__cudnn$fmha" in op.get_attr("module"))
    position = ops.DATA_INPUT.get(op.type)
    state = _single(states) if position is None else _only(states, position)
    _check(state.axis == 0)
    return state


def _batch_norm(op: Any, states: States, count: int | None) -> list[Place | None]:
    """Normalizes; on the axis of the rows, only with given statistics."""
    state, others = _only(states, 0), len(op.outputs) - 1
    # tf_keras' LayerNormalization has the rows on the axis of channels.
    if state.axis == (1 if op.get_attr("data_format") == b"NCHW" else _rank(op.inputs[0]) - 1):
        return [state, *[state._replace(axis=0)] * others]
    _check(state.axis == 0 and not op.get_attr("is_training"))
    return [state, *[None] * others]


def _matmul(op: Any, states: States, count: int | None) -> Place:
    """Multiplies matrices; the axis of the rows must not be contracted."""
    flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")

    def place(i: int, state: Place) -> Place:
        from_end = _rank(op.inputs[i]) - 1 - state.axis  # 0 or 1: an axis of the matrices
        _check(from_end != i ^ int(op.get_attr(flags[i])))  # the contracted one
        from_end = from_end if from_end > 1 else 1 - i
        return state._replace(axis=_rank(op.outputs[0]) - 1 - from_end)

    return _single(state and place(i, state) for i, state in enumerate(states))


def _einsum(op: Any, states: States, count: int | None) -> Place:
    """Multiplies; the result must have the label of the rows."""
    equation = op.get_attr("equation").decode().replace(" ", "")
    _check("." not in equation)
    inputs, output = equation.split("->")
    return _single(
        state and state._replace(axis=output.index(term[state.axis]))
        for term, state in zip(inputs.split(","), states, strict=True)
    )


def _concat(op: Any, states: States, count: int | None) -> Place:
    """Concatenates views of the rows, or along another axis."""
    places = [state for state in states[:-1] if state]
    axis = int(_static(op.inputs[-1])) % _rank(op.outputs[0])
    if axis != places[0].axis:
        return _along(op, states, count)
    _check(len(places) == len(states) - 1)
    place = _single(each._replace(views=1) for each in places)
    return place._replace(views=sum(each.views for each in places))


def _split(op: Any, states: States, count: int | None) -> Place:
    """Splits views of the rows, or along another axis."""
    state, parts = _single(states), len(op.outputs)
    if op.type != "Split" or int(_static(op.inputs[0])) % _rank(op.outputs[0]) != state.axis:
        return _along(op, states, count)
    _check(state.views % parts == 0)
    return state._replace(views=state.views // parts)


def _along(op: Any, states: States, count: int | None) -> Place:
    """Computes along axes other than the axis of the rows, and may remove them."""
    state, result = _single(states), op.outputs[0]
    rank = max(_rank(x) for x, each in zip(op.inputs, states, strict=True) if each)
    axes = {int(axis) % rank for axis in np.ravel(_AXES[op.type](op))}
    _check(state.axis not in axes)
    if _rank(result) == rank:
        return state
    _check(_rank(result) == rank - len(axes))
    return state._replace(axis=state.axis - sum(axis < state.axis for axis in axes))


def _transpose(op: Any, states: States, count: int | None) -> Place:
    state = _only(states, 0)
    return state._replace(axis=_static(op.inputs[1]).tolist().index(state.axis))


def _insert(op: Any, states: States, count: int | None) -> Place:
    """Inserts an axis."""
    state = _only(states, 0) if op.type == "OneHot" else _single(states)
    axis = _static(op.inputs[1]).flatten()[0] if op.type == "ExpandDims" else op.get_attr("axis")
    return state._replace(axis=state.axis + (int(axis) % _rank(op.outputs[0]) <= state.axis))


def _reshape(op: Any, states: States, count: int | None) -> Place:
    """Finds the axis of the rows by the sizes before and after it."""
    state = _only(states, 0)
    old, new = op.inputs[0].shape.as_list(), op.outputs[0].shape.as_list()
    is_first = all(size == 1 for size in old[: state.axis])
    frames = op.traceback[-_DEPTH:] if None in [*old, *new] and is_first else ()
    if any(frame.filename.endswith(_LIBRARY_FUNCTIONS) for frame in frames):
        # Functions such as tf.tensordot fold the leading axes, and unfold them again.
        return state._replace(axis=next((i for i, size in enumerate(new) if size != 1), 0))
    before, after = _product(old[: state.axis]), _product(old[state.axis + 1 :]) * state.inner
    for axis, views in itertools.product(range(len(new)), {state.views, 1}):
        if _product(new[:axis]) * views == before * state.views:
            inner, rest = divmod(after, _product(new[axis + 1 :]))
            # With a size that is not static, a group of rows may be an axis too.
            if inner and not rest and new[axis] in (None, count and count * inner * views):
                return Place(axis, inner, views)
    raise CombinesRows


def _product(sizes: Sequence[int | None]) -> int:
    _check(None not in sizes and 0 not in sizes)
    return math.prod(size or 1 for size in sizes)


def _strided_slice(op: Any, states: States, count: int | None) -> Place:
    """Slices axes other than the axis of the rows."""
    state, strides = _only(states, 0), _static(op.inputs[3])
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    begin, end, ellipsis, inserted, removed = (op.get_attr(f"{name}_mask") for name in names)

    def index(i: int) -> Any:
        if (ellipsis | inserted | removed) >> i & 1:
            return ... if ellipsis >> i & 1 else None if inserted >> i & 1 else 0
        return slice(None, None, strides[i]) if begin & end & 1 << i else slice(0, 1)

    # Two rows, whose other axes have one entry each, are sliced in the same way.
    rows = np.arange(2).reshape([1 + (i == state.axis) for i in range(_rank(op.inputs[0]))])
    rows = rows[tuple(map(index, range(len(strides))))]
    _check(rows.ravel().tolist() == [0, 1])
    return state._replace(axis=rows.shape.index(2))


def _gather(op: Any, states: States, count: int | None) -> Place:
    """Gathers rows of a table that does not depend on the batch."""
    axis = _static(op.inputs[2]) if op.type == "GatherV2" else 0
    _check(not axis and not op.get_attr("batch_dims"))
    return _only(states[:2], 1)


# The files of functions that fold axes, and how many frames deep their reshapes are.
_LIBRARY_FUNCTIONS = (
    os.path.join("tensorflow", "python", "ops", "math_ops.py"),
    os.path.join("tensorflow", "python", "ops", "nn_ops.py"),
    os.path.join("tf_keras", "src", "layers", "normalization", "layer_normalization.py"),
)
_DEPTH = 10


def _find_ones(tensor: tf.Tensor) -> list[int]:
    return [axis for axis, size in enumerate(tensor.shape) if size == 1]


def _by_op(*rows: tuple[str, Any]) -> dict[str, Any]:
    """Returns op -> value from rows of several ops each."""
    return {name: value for names, value in rows for name in names.split()}


# Op -> the axes that it computes along.
_AXES: dict[str, Callable[[Any], Any]] = _by_op(
    ("All Any ArgMax ArgMin Max Mean Min Prod Sum", lambda op: _static(op.inputs[1])),
    ("ConcatV2 Cumprod Cumsum ReverseV2 Roll", lambda op: _static(op.inputs[-1])),
    ("LogSoftmax Softmax TopKV2", lambda op: -1),
    ("Split SplitV", lambda op: _static(op.inputs[0 if op.type == "Split" else 2])),
    ("Pad PadV2 MirrorPad", lambda op: np.flatnonzero(_static(op.inputs[1]).any(axis=1))),
    ("Tile", lambda op: np.flatnonzero(_static(op.inputs[1]) != 1)),
    ("Squeeze", lambda op: op.get_attr("squeeze_dims") or _find_ones(op.inputs[0])),
    ("Unpack", lambda op: op.get_attr("axis")),
)
_RULES: dict[str, RowRule] = _by_op(
    (" ".join(ops.ELEMENTWISE), _elementwise),
    (
        """
        AvgPool BiasAdd Conv2D Conv2DBackpropInput Conv3D DepthwiseConv2dNative MaxPool
        ResizeBilinear ResizeNearestNeighbor SoftmaxCrossEntropyWithLogits
        SparseSoftmaxCrossEntropyWithLogits XlaCallModule
        """,
        _leading,
    ),
    ("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", _batch_norm),
    ("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3", _matmul),
    ("Einsum", _einsum),
    (" ".join(_AXES), _along),
    ("ConcatV2", _concat),
    ("Split", _split),
    ("Transpose", _transpose),
    ("ExpandDims OneHot Pack", _insert),
    ("Reshape", _reshape),
    ("StridedSlice", _strided_slice),
    ("GatherV2 ResourceGather", _gather),
    ("IdentityN", lambda op, states, count: list(states)),
)
