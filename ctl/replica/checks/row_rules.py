"""Rules of the ops that compute a row of a batch from that row alone.

A rule gets the op, where its inputs hold the rows, and the number of rows if it is static. It returns
where all outputs, or each of them, hold the rows, and raises `CombinesRows` otherwise. The rules save
the time of the probe, and accept networks that the probe cannot compute. So they cover the ops of
ordinary layers and losses: any other op counts as one that combines rows, and is left to the probe.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
import math
import os
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.replica.graphs import ops


class Rows(NamedTuple):
    """A tensor in which each entry depends on one row only.

    The size of the axis of rows is outer x rows x inner, in this order of its entries. Two views that
    are concatenated on axis 0 have outer = 2; [rows, time] folded into one axis has inner = time.

    Attributes:
        axis: the axis that holds the rows.
        outer: the number of blocks, each of which has all rows.
        inner: the number of consecutive entries of each row.
        listed: whether the tensor is a list of such tensors, as loops use.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    listed: bool = False


States = Sequence[Rows | None]
Rule = Callable[[Any, States, int | None], Rows | list[Rows | None]]


class CombinesRows(Exception):
    """An op combines several rows, or may do so."""


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


def _single(states: Iterable[Rows | None]) -> Rows:
    """Returns the place of the rows if all inputs that have some agree."""
    places = {state for state in states if state is not None}
    _check(len(places) == 1)
    return places.pop()


def _only(states: States, position: int) -> Rows:
    """Returns the place in one input; the others must not depend on the batch."""
    _check(not any(states[:position]) and not any(states[position + 1 :]))
    return _single(states)


def _check(condition: bool) -> None:
    if not condition:
        raise CombinesRows


def _rank(tensor: tf.Tensor) -> int:
    _check(tensor.shape.rank is not None)
    return int(tensor.shape.rank)


def _static(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    _check(value is not None)
    return value


# Ops that compute element by element.


def _elementwise(op: Any, states: States, count: int | None) -> Rows:
    """Aligns the inputs at their last axes."""
    return _single(
        None if state is None else
        state._replace(axis=state.axis + _rank(op.outputs[0]) - _rank(tensor))
        for tensor, state in zip(op.inputs, states, strict=True)
    )  # fmt: skip


def _select(op: Any, states: States, count: int | None) -> Rows:
    # tf.compat.v1.where with a vector selects entries of axis 0.
    vector = op.inputs[0].shape.rank == 1
    return _single(states) if vector else _elementwise(op, states, count)


# Products, convolutions and normalizations.


def _leading(op: Any, states: States, count: int | None) -> Rows:
    """Accepts rows on axis 0."""
    position = ops.DATA_INPUT.get(op.type)
    state = _single(states) if position is None else _only(states, position)
    _check(state.axis == 0)
    return state


def _call_module(op: Any, states: States, count: int | None) -> Rows:
    """Accepts the fused attention, whose operands have the rows on axis 0."""
    _check(b"__cudnn$fmha" in op.get_attr("module"))
    return _leading(op, states, count)


def _space_to_batch(op: Any, states: States, count: int | None) -> Rows:
    """Moves blocks of positions to blocks of axis 0, or back."""
    state, blocks = _leading(op, states, count), math.prod(_static(op.inputs[1]).tolist())
    if op.type == "SpaceToBatchND":
        return state._replace(outer=state.outer * blocks)
    _check(state.outer % blocks == 0)
    return state._replace(outer=state.outer // blocks)


def _batch_norm(op: Any, states: States, count: int | None) -> list[Rows | None]:
    """Normalizes; on the axis of the rows, only with given statistics."""
    state, others = _only(states, 0), len(op.outputs) - 1
    # tf_keras' LayerNormalization has the rows on the axis of channels.
    if state.axis == (1 if op.get_attr("data_format") == b"NCHW" else _rank(op.inputs[0]) - 1):
        return [state, *[state._replace(axis=0)] * others]
    _check(state.axis == 0 and not op.get_attr("is_training"))
    return [state, *[None] * others]


def _matmul(op: Any, states: States, count: int | None) -> Rows:
    """Multiplies matrices; the axis of the rows must not be contracted."""
    flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    rank, places = _rank(op.outputs[0]), set()
    for i, (tensor, state) in enumerate(zip(op.inputs, states, strict=True)):
        if state is None:
            continue
        from_end = _rank(tensor) - 1 - state.axis  # 0 or 1: an axis of the matrices
        if from_end < 2:
            transposed = int(op.get_attr(flags[i]))
            _check(from_end == (transposed if i else 1 - transposed))  # otherwise it is contracted
            from_end = 1 - i
        places.add(state._replace(axis=rank - 1 - from_end))
    return _single(places)


def _einsum(op: Any, states: States, count: int | None) -> Rows:
    """Multiplies; the result must have the label of the rows."""
    inputs, _, output = op.get_attr("equation").decode().replace(" ", "").partition("->")
    labels, places = _labels(output, _rank(op.outputs[0])), set()
    for term, tensor, state in zip(inputs.split(","), op.inputs, states, strict=True):
        if state is not None:
            label = _labels(term, _rank(tensor))[state.axis]
            places.add(state._replace(axis=labels.index(label)))
    return _single(places)


def _labels(term: str, rank: int) -> list[Any]:
    """Returns the label of each axis; the labels of an ellipsis are numbered from its end."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *range(-hidden, 0), *after]


# Ops along axes other than the axis of the rows.


def _trailing(axes: int) -> Rule:
    """Returns the rule of an op that combines the last axes."""

    def rule(op: Any, states: States, count: int | None) -> Rows:
        state = _single(states)
        _check(state.axis < _rank(op.inputs[0]) - axes)
        return state

    return rule


def _reduction(op: Any, states: States, count: int | None) -> Rows:
    state, rank = _single(states), _rank(op.inputs[0])
    axes = {int(axis) % rank for axis in _static(op.inputs[1]).flatten()}
    reduced = _without(state, axes)
    keeps = not op.type.startswith("Arg") and op.get_attr("keep_dims")
    return state if keeps else reduced


def _without(state: Rows, axes: Collection[int]) -> Rows:
    """Returns the place of the rows once other axes are removed."""
    _check(state.axis not in axes)
    return state._replace(axis=state.axis - sum(axis < state.axis for axis in axes))


def _scan(op: Any, states: States, count: int | None) -> Rows:
    """Keeps the shape; the last input has the axes."""
    state, rank = _single(states), _rank(op.inputs[0])
    _check(all(int(axis) % rank != state.axis for axis in _static(op.inputs[-1]).flatten()))
    return state


# Ops that move values.


def _transpose(op: Any, states: States, count: int | None) -> Rows:
    state = _single(states)
    return state._replace(axis=_static(op.inputs[1]).tolist().index(state.axis))


def _reshape(op: Any, states: States, count: int | None) -> Rows:
    """Finds the axis of the rows by the sizes before and after it."""
    state = _single(states)
    old, new = op.inputs[0].shape, op.outputs[0].shape
    _check(old.rank is not None and new.rank is not None)
    is_first = state.outer == 1 and all(size == 1 for size in old[: state.axis])
    frames = op.traceback[-_DEPTH:] if None in [*old, *new] and is_first else ()
    if any(frame.filename.endswith(_LIBRARY_FUNCTIONS) for frame in frames):
        # Functions such as tf.tensordot fold the leading axes, and unfold them again.
        return state._replace(axis=next(i for i, size in enumerate([*new, None]) if size != 1))
    before = _product(old[: state.axis]) * state.outer
    after = _product(old[state.axis + 1 :]) * state.inner
    for axis in range(new.rank):
        _check(all(size is not None for size in new[:axis]))
        outer = before / math.prod(new[:axis])
        inner = after / _product(new[axis + 1 :])
        if outer < 1:
            break
        exact = outer == int(outer) and inner == int(inner) and inner >= 1
        if exact and (count is None or new[axis] in (None, int(outer) * count * int(inner))):
            # With a size that is not static, a group of rows may be an axis too.
            _check(count is not None or new[axis] is None)
            return Rows(axis, int(outer), int(inner))
    raise CombinesRows


def _product(sizes: Sequence[int | None]) -> int:
    _check(None not in list(sizes) and 0 not in list(sizes))
    return math.prod(size or 1 for size in sizes)


def _insert(op: Any, states: States, count: int | None) -> Rows:
    """Inserts an axis."""
    state = _only(states, 0) if op.type == "OneHot" else _single(states)
    axis = _static(op.inputs[1]).flatten()[0] if op.type == "ExpandDims" else op.get_attr("axis")
    return state._replace(axis=state.axis + (int(axis) % _rank(op.outputs[0]) <= state.axis))


def _squeeze(op: Any, states: States, count: int | None) -> Rows:
    state, shape = _single(states), op.inputs[0].shape
    axes = [axis % _rank(op.inputs[0]) for axis in op.get_attr("squeeze_dims")]
    axes = axes or [i for i, size in enumerate(shape) if size == 1 and i != state.axis]
    _check(_rank(op.outputs[0]) == shape.rank - len(axes))
    return _without(state, axes)


def _unpack(op: Any, states: States, count: int | None) -> Rows:
    return _without(_single(states), [op.get_attr("axis") % _rank(op.inputs[0])])


def _concat(op: Any, states: States, count: int | None) -> Rows:
    """Concatenates tensors; on the axis of the rows, as blocks."""
    *tensors, axis = op.inputs
    axis = int(_static(axis)) % _rank(op.outputs[0])
    state = _single(s._replace(outer=1) if s and s.axis == axis else s for s in states)
    if state.axis != axis:
        return state
    # A tensor that does not depend on the batch must fill its blocks.
    places = (
        p or _block(state, x.shape[axis], 0, count) for x, p in zip(tensors, states, strict=False)
    )
    return state._replace(outer=sum(place.outer for place in places))


def _split(op: Any, states: States, count: int | None) -> Rows | list[Rows | None]:
    """Splits a tensor; on the axis of the rows, into blocks."""
    by_sizes = op.type == "SplitV"
    value, axis = (op.inputs[0], op.inputs[2]) if by_sizes else (op.inputs[1], op.inputs[0])
    state, axis = _single(states), int(_static(axis)) % _rank(value)
    if axis != state.axis:
        return state
    if not count:
        _check(not by_sizes and state.outer % len(op.outputs) == 0)
        return state._replace(outer=state.outer // len(op.outputs))
    return [_block(state, output.shape[axis], 0, count) for output in op.outputs]


def _block(state: Rows, size: int | None, begin: int, count: int | None) -> Rows:
    """Returns the rows in a range of an axis, which must have complete blocks."""
    if not size or count is None:
        raise CombinesRows
    unit = max(1, count) * state.inner
    _check(size % unit == 0 and begin % unit == 0)
    return state._replace(outer=size // unit)


def _strided_slice(op: Any, states: States, count: int | None) -> Rows:
    """Slices axes; on the axis of the rows, only complete blocks."""
    state, rank = _only(states, 0), _rank(op.inputs[0])
    masks = {
        k: op.get_attr(f"{k}_mask") for k in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    items = op.inputs[3].shape[0]
    source = target = 0
    for i in range(items):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            later = sum(1 for j in range(i + 1, items) if not masks["new_axis"] & (1 << j))
            skipped = rank - source - later
            if source <= state.axis < source + skipped:
                break
            source, target = source + skipped, target + skipped
        elif masks["new_axis"] & bit:
            target += 1
        elif source == state.axis:
            _check(not masks["shrink_axis"] & bit and int(_static(op.inputs[3])[i]) == 1)
            old, new = op.inputs[0].shape[source], op.outputs[0].shape[target]
            if masks["begin"] & masks["end"] & bit or (old is not None and old == new):
                return state._replace(axis=target)
            begin = 0 if masks["begin"] & bit else int(_static(op.inputs[1])[i])
            _check(old is not None)
            return _block(state, new, begin % (old or 1), count)._replace(axis=target)
        else:
            source, target = source + 1, target + (not masks["shrink_axis"] & bit)
    return state._replace(axis=target + state.axis - source)


def _slice(op: Any, states: States, count: int | None) -> Rows:
    state = _only(states, 0)
    old, new = op.inputs[0].shape[state.axis], op.outputs[0].shape[state.axis]
    if old is not None and old == new:
        return state
    begin, size = (int(_static(x)[state.axis]) for x in op.inputs[1:])
    return state if (begin, size) == (0, -1) else _block(state, new, begin, count)


def _pad(op: Any, states: States, count: int | None) -> Rows:
    state = _single(states)
    _check(not _static(op.inputs[1])[state.axis].any())
    return state


def _tile(op: Any, states: States, count: int | None) -> Rows:
    """Repeats axes; on the axis of the rows, as blocks."""
    state = _single(states)
    old, new = op.inputs[0].shape[state.axis], op.outputs[0].shape[state.axis]
    multiple = new // old if old and new else int(_static(op.inputs[1])[state.axis])
    return state._replace(outer=state.outer * multiple)


def _broadcast(op: Any, states: States, count: int | None) -> Rows:
    return _elementwise(op, [states[0], *[None] * (len(states) - 1)], count)


def _gather(op: Any, states: States, count: int | None) -> Rows:
    """Gathers entries of a table that does not depend on the batch, or of other axes."""
    params, indices = states[0], states[1]
    rank = _rank(op.inputs[1])
    batch = op.get_attr("batch_dims") % (rank + 1)
    axis = int(_static(op.inputs[2])) if op.type == "GatherV2" else 0
    axis += _rank(op.inputs[0]) if axis < 0 else 0
    places = set()
    if params is not None:
        _check(params.axis != axis)
        shift = rank - batch - 1 if params.axis > axis else 0
        places.add(params._replace(axis=params.axis + shift))
    if indices is not None:
        shift = axis - batch if indices.axis >= batch else 0
        places.add(indices._replace(axis=indices.axis + shift))
    return _single(places)


def _gather_nd(op: Any, states: States, count: int | None) -> Rows:
    state = _only(states, 1)
    _check(state.axis < _rank(op.inputs[1]) - 1)
    return state


# Lists of tensors, as loops use, and identities.


def _list_item(op: Any, states: States, count: int | None) -> Rows:
    state = _only(states, 0)
    return state._replace(axis=state.axis + (op.type == "TensorListStack"), listed=False)


def _list_from_tensor(op: Any, states: States, count: int | None) -> Rows:
    state = _only(states, 0)
    _check(state.axis > 0)  # otherwise each item of the list is a row
    return state._replace(axis=state.axis - 1, listed=True)


def _list_set(op: Any, states: States, count: int | None) -> Rows:
    """Adds a tensor, at an index that does not depend on the batch."""
    _check(op.type != "TensorListSetItem" or states[1] is None)
    return _single(s and s._replace(listed=True) for s in (states[0], states[-1]))


def _identities(op: Any, states: States, count: int | None) -> list[Rows | None]:
    return list(states)


_IDENTITIES = ("Identity", "IdentityN", "StopGradient", "PreventGradient")
# The files of functions that fold axes, and how many frames deep their reshapes are.
_LIBRARY_FUNCTIONS = (
    os.path.join("tensorflow", "python", "ops", "math_ops.py"),
    os.path.join("tensorflow", "python", "ops", "nn_ops.py"),
    os.path.join("tf_keras", "src", "layers", "normalization", "layer_normalization.py"),
)
_DEPTH = 10

_RULES: dict[str, Rule] = {
    name: rule
    for rule, names in (
        (_elementwise, " ".join(ops.ELEMENTWISE)),
        (_select, "Select"),
        (
            _leading,
            """
            AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D AvgPoolGrad BiasAdd Conv2D
            Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 DepthToSpace DepthwiseConv2dNative
            DepthwiseConv2dNativeBackpropInput Dilation2D ExtractImagePatches HSVToRGB
            ImageProjectiveTransformV3 InTopKV2 LRN MaxPool MaxPool3D MaxPoolGrad MaxPoolGradWithArgmax
            RGBToHSV ResizeArea ResizeBicubic ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor
            ResizeNearestNeighborGrad SoftmaxCrossEntropyWithLogits SpaceToDepth
            SparseSoftmaxCrossEntropyWithLogits
            """,
        ),
        (_call_module, "XlaCallModule"),
        (_space_to_batch, "SpaceToBatchND BatchToSpaceND"),
        (_batch_norm, "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3"),
        (_matmul, "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3"),
        (_einsum, "Einsum"),
        (_trailing(1), "LogSoftmax Softmax TopK TopKV2 FFT IFFT RFFT IRFFT MatrixDiagV3"),
        (
            _trailing(2),
            """
            Cholesky FFT2D IFFT2D IRFFT2D LogMatrixDeterminant MatrixBandPart MatrixDeterminant
            MatrixDiagPartV3 MatrixInverse MatrixSetDiagV3 MatrixSolve MatrixTriangularSolve Qr RFFT2D
            SelfAdjointEigV2 Svd
            """,
        ),
        (_reduction, "All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum"),
        (_scan, "Cumsum Cumprod CumulativeLogsumexp ReverseV2 Roll"),
        (_transpose, "Transpose"),
        (_reshape, "Reshape"),
        (_insert, "ExpandDims OneHot Pack"),
        (_squeeze, "Squeeze"),
        (_unpack, "Unpack"),
        (_concat, "ConcatV2"),
        (_split, "Split SplitV"),
        (_strided_slice, "StridedSlice"),
        (_slice, "Slice"),
        (_pad, "Pad PadV2 MirrorPad"),
        (_tile, "Tile"),
        (_broadcast, "BroadcastTo"),
        (_gather, "GatherV2 ResourceGather"),
        (_gather_nd, "GatherNd ResourceGatherNd"),
        (_list_item, "TensorListGetItem TensorListStack"),
        (_list_from_tensor, "TensorListFromTensor"),
        (_list_set, "TensorListSetItem TensorListPushBack"),
        (_identities, "IdentityN"),
    )
    for name in names.split()
}
