"""Checks that a stateless random op draws the same numbers however the batch is split.

A draw with a constant seed is the same on all replicas if its shape is, as for an initializer or a
fixed projection, but not for noise of shape [rows, ...]. Shapes are constants by the time the step is
traced, so the tensors that a draw is combined with show which of the two it is.
"""

from collections.abc import Sequence
import itertools
from typing import Any

import tensorflow as tf

from ctl.replica.graphs import row_axis

# Ops that read only the shape of a tensor.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
_DATA = ("IteratorGetNext", "IteratorGetNextAsOptional", "MultiDeviceIteratorGetNextFromShard")
# Ops that combine their inputs element by element.
_ELEMENTWISE = {
    *("Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "FloorDiv", "FloorMod", "Pow"),
    *(
        "Maximum",
        "Minimum",
        "SquaredDifference",
        "Xlogy",
        "Atan2",
        "MulNoNan",
        "Select",
        "SelectV2",
    ),
    *("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"),
    *("LogicalAnd", "LogicalOr", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
}
# Op -> the input that holds weights or a table, and not rows.
_WEIGHTS = {
    "BiasAdd": 1,
    "Conv1D": 1,
    "Conv2D": 1,
    "Conv3D": 1,
    "Conv2DBackpropInput": 1,
    "Conv3DBackpropInputV2": 1,
    "DepthwiseConv2dNative": 1,
    "DepthwiseConv2dNativeBackpropInput": 1,
    "GatherV2": 0,
}


class Dataflow:
    """Answers questions about the ops of one step.

    Args:
        inputs: the tensors of the batch.
        count: the number of rows; an int if it is static.
        parts: the number of micro-batches that the rows are computed in.

    Attributes:
        counts: the numbers of rows of the batch and of its micro-batches; empty if they are known only
            when the step runs.
    """

    def __init__(self, inputs: Sequence[tf.Tensor], count: int | tf.Tensor | None, parts: int = 1):
        self._depends = {id(tensor.op): True for tensor in inputs}
        # Ids are unique only while the tensors exist.
        self._keep: list[Any] = list(inputs)
        self.counts: set[int] = set()
        if isinstance(count, int):
            ends = [count * i // parts for i in range(parts + 1)]
            self.counts = {count, *(b - a for a, b in itertools.pairwise(ends))} - {0}

    def differs_between_splits(self, op: Any) -> bool:
        """Returns whether a stateless random op may depend on how the batch is split.

        It is True also if the ops do not show it.
        """
        result = op.outputs[0]
        if any(self.depends_on_batch(tensor) for tensor in op.inputs):
            return True
        if not result.shape.is_fully_defined():
            return True
        # A static shape cannot follow a number of rows that is known only when the step runs.
        if not self.counts or not result.shape.rank:
            return False
        if not _holds_rows(result.shape, self.counts) and not self.counts.intersection(
            result.shape
        ):
            return False
        return self._combined_with_rows(result)

    def depends_on_batch(self, tensor: tf.Tensor) -> bool:
        """Returns whether a value depends on the batch or on the replica, as far as the ops show."""
        stack = [tensor.op]
        while stack:
            op = stack[-1]
            if id(op) in self._depends:
                stack.pop()
                continue
            sources = self._sources(op)
            if isinstance(sources, bool):
                self._remember(op, sources)
                continue
            known = [self._depends.get(id(source)) for source in sources]
            if True in known or None not in known:
                self._remember(op, True in known)
            else:
                unknown = [s for s, k in zip(sources, known, strict=True) if k is None]
                if any(source is op for source in unknown):  # a cycle, which is not expected
                    self._remember(op, True)
                stack.extend(unknown)
        return self._depends[id(tensor.op)]

    def _sources(self, op: Any) -> bool | list[Any]:
        """Returns the ops of an op's inputs, or whether it depends on the batch by itself."""
        if op.type in _DATA:
            return True
        if op.type == "Const":
            return "replica_id" in op.name
        if op.type == "ReadVariableOp":  # the same on all replicas
            return False
        if op.type == "Placeholder":
            outer = row_axis.captured(op.outputs[0])
            if outer is not None:
                return [outer.op]
            return op.outputs[0].dtype != tf.resource
        return [tensor.op for tensor in op.inputs]

    def _remember(self, op: Any, depends: bool) -> None:
        self._depends[id(op)] = depends
        self._keep.append(op)

    def _combined_with_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor that is equal on all replicas is combined with rows of a batch."""
        derived = {id(tensor)}
        queue = [tensor]
        while queue:
            current = queue.pop()
            if any(current is output for output in getattr(current.graph, "outputs", ())):
                return True
            for op in current.consumers():
                if op.type in _SHAPES:
                    continue
                others = [x for x in op.inputs if id(x) not in derived and x.shape.rank != 0]
                data = [x for x in others if self.depends_on_batch(x)]
                if data:
                    if any(not _independent(op, current, other, self.counts) for other in data):
                        return True
                    continue
                if random_call(op) or _is_left_factor(op, current):
                    return True
                for output in op.outputs:
                    if id(output) not in derived:
                        derived.add(id(output))
                        queue.append(output)
        return False


def random_call(op: Any) -> bool:
    """Returns whether an op runs a function, whose ops are not followed."""
    return op.type.endswith(("PartitionedCall", "While", "If", "Case"))


def _is_left_factor(op: Any, tensor: tf.Tensor) -> bool:
    """Returns whether a matrix is multiplied from the right, as the rows of a batch are by a kernel."""
    return op.type in ("MatMul", "BatchMatMulV2", "Conv2D") and op.inputs[0] is tensor


def _independent(op: Any, tensor: tf.Tensor, rows: tf.Tensor, counts: set[int]) -> bool:
    """Returns whether an op applies the same tensor to each row; False if that is not clear."""
    shape, other = tensor.shape, rows.shape
    if op.type in _WEIGHTS:
        return op.inputs[_WEIGHTS[op.type]] is tensor
    if op.type == "MatMul":
        # The contraction is over features, and not over rows.
        if op.inputs[1] is tensor:
            return not op.get_attr("transpose_a") and _holds_rows(other, counts)
        return bool(op.get_attr("transpose_b")) and _holds_rows(other, counts)
    if op.type in ("BatchMatMulV2", "BatchMatMul") and op.inputs[1] is tensor:
        return shape.rank < (other.rank or 0) or shape[0] == 1
    if op.type == "Einsum":
        terms = op.get_attr("equation").decode().partition("->")[0].split(",")
        own, data = (terms[_position(op, x)] for x in (tensor, rows))
        return data[:1].isalpha() and data[0] not in own
    if op.type not in _ELEMENTWISE or other.rank is None or shape.rank is None:
        return False
    if shape.rank >= other.rank:  # axis 0 of the rows is aligned with an axis of the tensor
        aligned = shape[shape.rank - other.rank]
        return aligned == 1 and shape.rank == other.rank
    return _holds_rows(other, counts) or not counts.intersection(shape)


def _position(op: Any, tensor: tf.Tensor) -> int:
    return next(i for i, x in enumerate(op.inputs) if x is tensor)


def _holds_rows(shape: tf.TensorShape, counts: set[int]) -> bool:
    """Returns whether axis 0 can hold the rows: all of them, or several entries of each."""
    if not shape.rank or shape[0] is None:
        return False
    # Every number is a multiple of a micro-batch of one row.
    return shape[0] in counts or any(shape[0] % count == 0 for count in counts if count > 1)
