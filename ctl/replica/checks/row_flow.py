"""Follows the rows of a batch through the ops of a traced step.

`RowFlow` finds the tensors that hold the rows on their first axis, and the ops that combine several
rows. It knows four families of ops, which ordinary networks consist of: ops that compute by element,
ops along other axes, products, and reshapes. Every other op counts as one that combines rows, so a
result of `Mixed` means "perhaps", and the probe decides.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import os
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl.replica.graphs import ops
from ctl.replica.graphs.dataflow import outer_tensor

_NORMALIZATIONS = (
    os.path.join("tf_keras", "src", "layers", "normalization", "batch_normalization.py"),
    os.path.join("ctl", "replica", "arithmetic", "moments.py"),
)
_LAYER_NORMALIZATION = os.path.join(
    "tf_keras", "src", "layers", "normalization", "layer_normalization.py"
)
_SUMS = ("Mean", "Sum", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
# Sums over the replicas that user code may contain.
_COLLECTIVES = (
    "CollectiveAllToAllV2", "CollectiveGather", "CollectiveGatherV2", "CollectiveReduce",
    "CollectiveReduceV2", "CollectiveReduceV3", "CrossReplicaSum", "NcclAllReduce", "XlaAllReduce",
)  # fmt: skip


class Rows(NamedTuple):
    """A tensor in which each entry depends on one row only.

    Attributes:
        axis: the axis that holds the rows. The axes before it have size 1.
        inner: the number of consecutive entries of a row on this axis: [rows, time, ...] folded into
            [rows x time, ...] has inner = time.
    """

    axis: int = 0
    inner: int = 1


class Mixed(NamedTuple):
    """A value in which each entry may depend on several rows: the op that combined them first."""

    op: Any


State = Rows | Mixed | None  # None: does not depend on the batch
Resolve = Callable[[tf.Tensor], tf.Tensor | None]


class RowFlow:
    """The states of the tensors of one graph, and of its enclosing graphs.

    Args:
        sources: the id of a tensor of a batch -> its state; the tensors must be kept alive.
        count: the number of rows; None if it is known only when the step runs.
        clean: ids of tensors that are the same function of the global batch on every split.
        resolve: returns the tensor that a placeholder stands for.

    Attributes:
        statistics: the ops that computed statistics of a batch normalization.
    """

    def __init__(
        self,
        sources: Mapping[int, State],
        *,
        count: int | None,
        clean: Iterable[int] = (),
        resolve: Resolve = outer_tensor,
    ):
        self._count = count
        self._clean = frozenset(clean)
        self._resolve = resolve
        self._states: dict[int, State] = {**dict.fromkeys(self._clean), **sources}
        self._keep: list[Any] = []  # ids are unique only while the tensors exist
        self.statistics: list[Any] = []

    def state(self, tensor: tf.Tensor) -> State:
        """Returns where a tensor holds the rows."""
        if not hasattr(tensor, "op"):  # eager
            return None
        states, stack = self._states, [tensor]
        while stack:
            top = stack[-1]
            if id(top) in states:
                stack.pop()
                continue
            op = top.op
            inputs = op.inputs
            if not len(inputs):
                outer = self._resolve(top) if op.type == "Placeholder" else None
                inputs = () if outer is None else (outer,)
            unknown = [x for x in inputs if id(x) not in states and hasattr(x, "op")]
            if unknown:
                stack.extend(unknown)
                continue
            known = [states.get(id(x)) for x in inputs]
            outputs = [known[0]] if op.type == "Placeholder" and known else self._apply(op, known)
            for output, state in zip(op.outputs, outputs, strict=True):
                states.setdefault(id(output), state)  # a clean output stays clean
            self._keep.append(op)
            stack.pop()
        return states[id(tensor)]

    def _apply(self, op: Any, states: Sequence[State]) -> Sequence[State]:
        """Returns the states of an op's outputs."""
        kind, outputs = op.type, len(op.outputs)
        if kind in ops.SHAPES or kind in _COLLECTIVES or not any(states):
            return [None] * outputs
        if kind in ops.FUNCTIONS:
            try:
                return self._call(op, states)
            except ValueError:  # a function with other arguments than the op has inputs
                return [Mixed(op)] * outputs
        mixed = next((state for state in states if isinstance(state, Mixed)), None)
        if mixed is None:
            rows = _apply_rule(
                op, [s if isinstance(s, Rows) else None for s in states], self._count
            )
            if rows is not None:
                return rows
            # The layer moves the rows to the axis of the channels, which a reshape of a single row does
            # not show.
            if self._count == 1 and _is_from(op, _LAYER_NORMALIZATION):
                return [states[0], *[None] * (outputs - 1)]
        # The batch normalizations are those of ctl and, with a warning, of tf_keras.
        if (mixed is None or kind in _SUMS) and _is_from(op, *_NORMALIZATIONS):
            return self._statistics(op, states)
        return [mixed or Mixed(op)] * outputs

    def _statistics(self, op: Any, states: Sequence[State]) -> Sequence[State]:
        """Returns the outputs of an op of a batch normalization that combines rows."""
        self.statistics.append(op)
        outputs: list[State] = [None] * len(op.outputs)
        if op.type.startswith("FusedBatchNorm"):
            outputs[0] = states[0]
        return outputs

    def _call(self, op: Any, states: Sequence[State]) -> Sequence[State]:
        """Returns the states of the outputs of functions that an op calls."""
        graphs = [graph for _, graph in ops.called_graphs(op)]
        # A function that was loaded from a SavedModel has no graph.
        if not graphs or op.type.endswith("While"):
            mixed = next((state for state in states if isinstance(state, Mixed)), Mixed(op))
            return [mixed] * len(op.outputs)
        if op.type in ops.CALLS:
            return self._run(graphs[0], states)
        results = [self._run(graph, states[1:]) for graph in graphs]
        joined = [_join(op, column) for column in zip(*results, strict=True)]
        if states[0] is None:
            return joined
        return [states[0] if isinstance(states[0], Mixed) else Mixed(op)] * len(joined)

    def _run(self, graph: Any, states: Sequence[State]) -> list[State]:
        sources = {id(x): state for x, state in zip(graph.inputs, states, strict=True)}
        inner = RowFlow(sources, count=self._count, clean=self._clean, resolve=lambda _: None)
        return [inner.state(output) for output in graph.outputs]


def _is_from(op: Any, *files: str) -> bool:
    """Returns whether the code of one of the files created an op."""
    return any(frame.filename.endswith(files) for frame in op.traceback)


def _join(op: Any, states: Sequence[State]) -> State:
    """Returns the state of a value that has one of several states."""
    distinct = {state for state in states if state is not None}
    mixed = next((state for state in distinct if isinstance(state, Mixed)), None)
    if mixed is not None or not distinct:
        return mixed
    return distinct.pop() if len(distinct) == 1 else Mixed(op)


# The rules of the ops that keep rows apart.


def _apply_rule(
    op: Any, states: Sequence[Rows | None], count: int | None
) -> Sequence[Rows | None] | None:
    """Returns the rows of the outputs of an op; None if it combines rows, or is not known."""
    if op.type == "IdentityN":
        return states
    places = {state for state in states if state is not None}
    if len(places) > 1:
        return None
    (rows,) = places
    inputs = [i for i, state in enumerate(states) if state is not None]
    try:
        if op.type == "Reshape":
            result = _reshape(op, rows, count)
            return None if result is None else [result]
        if op.type.startswith("FusedBatchNorm"):
            return _fused_batch_norm(op, rows, inputs)
        rule = _RULES.get(op.type)
        keeps = rule is not None and rows.axis == 0 and rule(op, inputs)
    # This covers ops with attributes or shapes that their rules do not expect.
    except (IndexError, TypeError, ValueError):
        return None
    return [rows] * len(op.outputs) if keeps else None


def _static(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    if value is None:
        raise ValueError("The value is known only when the step runs.")
    return value


def _by_element(op: Any, inputs: Sequence[int]) -> bool:
    # Axes are aligned from the last one on.
    return all(op.inputs[i].shape.rank == int(op.outputs[0].shape.rank) for i in inputs)


def _data_only(op: Any, inputs: Sequence[int]) -> bool:
    """Accepts rows of the data, but not of a kernel or a bias."""
    return op.type not in ops.DATA_INPUT or list(inputs) == [ops.DATA_INPUT[op.type]]


def _other_axes(op: Any, inputs: Sequence[int]) -> bool:
    """Accepts rows that are not on the axes which the op combines, moves, adds or removes."""
    place = _AXES[op.type]
    axes = op.get_attr(place) if isinstance(place, str) else _static(op.inputs[place])
    if op.type == "Squeeze" and not axes:
        axes = [i for i, size in enumerate(op.inputs[0].shape) if size in (1, None)]
    rank = max(int(x.shape.rank) for x in (op.inputs[inputs[0]], op.outputs[0]))
    return all(int(axis) % rank for axis in tf.nest.flatten(np.asarray(axes).tolist()))


def _last_axis(op: Any, inputs: Sequence[int]) -> bool:
    return int(op.inputs[0].shape.rank) > 1


def _matmul(op: Any, inputs: Sequence[int]) -> bool:
    if op.type == "MatMul":
        return list(inputs) == [0] and not op.get_attr("transpose_a")
    return int(op.outputs[0].shape.rank) > 2 and _by_element(op, inputs)


def _einsum(op: Any, inputs: Sequence[int]) -> bool:
    terms, _, output = op.get_attr("equation").decode().replace(" ", "").partition("->")
    return output[0].isalpha() and all(terms.split(",")[i][0] == output[0] for i in inputs)


def _gather(op: Any, inputs: Sequence[int]) -> bool:
    """Gathers from a table that does not depend on the batch, or from other axes."""
    axis = int(_static(op.inputs[2])) if op.type == "GatherV2" else 0
    if 0 in inputs:
        return axis > 0 and (1 not in inputs or op.get_attr("batch_dims") > 0)
    return axis == 0


def _strided_slice(op: Any, inputs: Sequence[int]) -> bool:
    """Slices other axes."""
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    first = {name: op.get_attr(f"{name}_mask") & 1 for name in names}
    if first["ellipsis"]:
        added = op.get_attr("new_axis_mask").bit_count()
        return int(op.inputs[3].shape[0]) - 1 - added < int(op.inputs[0].shape.rank)
    whole = (first["begin"] and first["end"]) or _same_size(op, inputs)
    return whole and not first["new_axis"] | first["shrink_axis"] and _static(op.inputs[3])[0] == 1


def _same_size(op: Any, inputs: Sequence[int]) -> bool:
    size = op.inputs[0].shape[0]
    return size is not None and op.outputs[0].shape[0] == size and list(inputs) == [0]


def _fused_batch_norm(op: Any, rows: Rows, inputs: Sequence[int]) -> list[Rows | None] | None:
    """Normalizes; only with given statistics, unless the rows are on the axis of channels."""
    channels = 1 if op.get_attr("data_format") == b"NCHW" else op.inputs[0].shape.rank - 1
    if list(inputs) != [0] or (rows.axis != channels and (rows.axis or op.get_attr("is_training"))):
        return None
    # tf_keras' LayerNormalization has the rows on the axis of channels, and so its statistics.
    statistics = Rows(0, rows.inner) if rows.axis == channels else None
    return [rows, *[statistics] * (len(op.outputs) - 1)]


def _reshape(op: Any, rows: Rows, count: int | None) -> Rows | None:
    """Finds the axis of the rows by the size of a row."""
    old, new = op.inputs[0].shape, op.outputs[0].shape
    size = rows.inner * math.prod(old[rows.axis + 1 :])
    for axis, entries in enumerate(new):
        inner, rest = divmod(size, math.prod(new[axis + 1 :]))
        exact = inner and not rest
        if exact and entries == (None if count is None else count * inner):
            return Rows(axis, inner)
        if entries != 1:
            break
    return None


# Op -> the input or the attribute with the axes that it combines, moves, adds or removes.
_AXES: dict[str, int | str] = {
    **dict.fromkeys(("All", "Any", "ArgMax", "ArgMin", "EuclideanNorm", "Max", "Mean", "Min"), 1),
    **dict.fromkeys(("Prod", "Sum", "Cumsum", "Cumprod", "ReverseV2", "ExpandDims"), 1),
    **{"Roll": 2, "ConcatV2": -1, "Split": 0, "SplitV": 2, "Squeeze": "squeeze_dims"},
    **dict.fromkeys(("Pack", "Unpack", "OneHot"), "axis"),
}
_ROWS_FIRST = """
    AvgPool AvgPool3D AvgPoolGrad BiasAdd Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2
    DepthToSpace DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput InTopKV2 LRN MaxPool MaxPool3D
    MaxPoolGrad ResizeBicubic ResizeBilinear ResizeNearestNeighbor Select SpaceToDepth
    SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
"""
_RULES: dict[str, Callable[[Any, Sequence[int]], bool]] = {
    **dict.fromkeys(ops.ELEMENTWISE, _by_element),
    **dict.fromkeys(_ROWS_FIRST.split(), _data_only),
    **dict.fromkeys(_AXES, _other_axes),
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopK", "TopKV2"), _last_axis),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _gather),
    **dict.fromkeys(("Slice", "BroadcastTo"), _same_size),
    "Einsum": _einsum,
    "StridedSlice": _strided_slice,
    "Transpose": lambda op, inputs: _static(op.inputs[1])[0] == 0,
    "Tile": lambda op, inputs: _static(op.inputs[1])[0] == 1,
    **dict.fromkeys(
        ("Pad", "PadV2", "MirrorPad"), lambda op, inputs: not _static(op.inputs[1])[0].any()
    ),
}
