"""Finds whether the numbers of a stateless random op depend on how the batch is split."""

from collections.abc import Sequence
import itertools
from typing import Any

import tensorflow as tf

from ctl.graphs import ops
from ctl.graphs.dataflow import ancestors, captured

_DATA = ("IteratorGetNext", "IteratorGetNextAsOptional", "MultiDeviceIteratorGetNextFromShard")


class DrawFlow:
    """Checks that a stateless random op draws the same numbers however the batch is split.

    A draw with a constant seed is the same on all replicas if its shape is, as for an initializer or a
    fixed projection, but not for noise of shape [rows, ...]. Shapes are constants by the time the step
    is traced, so the tensors that a draw is combined with show which of the two it is.

    Args:
        inputs: the tensors of the batch.
        count: the number of rows; an int if it is static.
        micro_batches: the number of micro-batches that the rows are computed in.

    Attributes:
        counts: the numbers of rows of the batch and of its micro-batches; empty if they are known only
            when the step runs.
    """

    def __init__(
        self, inputs: Sequence[tf.Tensor], count: int | tf.Tensor | None, micro_batches: int = 1
    ):
        self._batch = {id(tensor.op) for tensor in inputs}
        self._keep = list(inputs)  # ids are unique only while the tensors exist
        self.counts: set[int] = set()
        if isinstance(count, int):
            ends = [count * i // micro_batches for i in range(micro_batches + 1)]
            self.counts = {count, *(b - a for a, b in itertools.pairwise(ends))} - {0}

    def differs_between_splits(self, op: Any) -> bool:
        """Returns whether a stateless random op may depend on how the batch is split.

        It is True also if the ops do not show it. Numbers with a seed of the batch, such as the ids of
        examples, are functions of its rows, like those of any other op: the losses are searched for rows
        that affect each other.
        """
        if self.shows_split(op):
            return True
        return not any(map(self.depends_on_batch, op.inputs)) and self.may_be_of_rows(op.outputs[0])

    def may_be_of_rows(self, result: tf.Tensor) -> bool:
        """Returns whether numbers that are equal on all replicas may have an entry for each row."""
        # A static shape cannot follow a number of rows that is known only when the step runs.
        if not self.counts or not result.shape.rank:
            return False
        may_hold = _holds_rows(result.shape, self.counts) or self.counts.intersection(result.shape)
        return bool(may_hold) and self._combined_with_rows(result)

    def shows_split(self, op: Any) -> bool:
        """Returns whether the shape of a random op depends on the batch, or its seed on the replica."""
        is_known = op.outputs[0].shape.is_fully_defined()
        return not is_known or any(_is_replica(x.op) for x in ancestors(*op.inputs))

    def depends_on_batch(self, tensor: tf.Tensor) -> bool:
        """Returns whether a value depends on the batch or on the replica, as far as the ops show."""
        for source in ancestors(tensor):
            op = source.op
            if id(op) in self._batch or op.type in _DATA or _is_replica(op):
                return True
            if (
                op.type == "Placeholder"
                and source.dtype != tf.resource
                and captured(source) is None
            ):
                return True
        return False

    def _combined_with_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor that is equal on all replicas is combined with rows of a batch."""
        derived = {id(tensor)}
        queue = [tensor]
        while queue:
            current = queue.pop()
            if any(current is output for output in getattr(current.graph, "outputs", ())):
                return True
            for op in current.consumers():
                if op.type in ops.SHAPES:
                    continue
                others = [x for x in op.inputs if id(x) not in derived and x.shape.rank != 0]
                data = [x for x in others if self.depends_on_batch(x)]
                if data:
                    if any(not _independent(op, current, other, self.counts) for other in data):
                        return True
                    continue
                if op.type in ops.FUNCTIONS or _is_left_factor(op, current):
                    return True
                for output in op.outputs:
                    if id(output) not in derived:
                        derived.add(id(output))
                        queue.append(output)
        return False


def _is_replica(op: Any) -> bool:
    return op.type == "Const" and "replica_id" in op.name


def _is_left_factor(op: Any, tensor: tf.Tensor) -> bool:
    """Returns whether a matrix is multiplied from the right, as the rows of a batch are by a kernel."""
    return op.type in ("MatMul", "BatchMatMulV2", "Conv2D") and op.inputs[0] is tensor


def _independent(op: Any, tensor: tf.Tensor, rows: tf.Tensor, counts: set[int]) -> bool:
    """Returns whether an op applies the same tensor to each row; False if that is not clear."""
    shape, other = tensor.shape, rows.shape
    if op.type in ops.DATA_INPUT:
        return op.inputs[ops.DATA_INPUT[op.type]] is not tensor
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
    if op.type not in ops.ELEMENTWISE | {"Select"} or other.rank is None or shape.rank is None:
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
