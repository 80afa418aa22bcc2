"""Compares the losses of the replicas and the micro-batches of a trace.

`compare_replicas` and `compare_micro_batches` check that the parts of a step compute the same function
of their rows. Each of them traces the user's code again: a counter or another state of Python then gives
each its own constants, or its own ops.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.graphs import ops
from ctl.graphs.dataflow import outer_tensor
from ctl.rows.trace import MicroBatchTrace, Trace, UpdateTrace, symbolic

# The barrier that orders micro-batches has several inputs; its output i is its input i.
_IDENTITIES = ("Identity", "StopGradient", "EnsureShape", "Snapshot", "XlaOptimizationBarrier")
_SHOWN = 40  # characters of a constant


class TraceDifference(NamedTuple):
    """The place where two traces differ.

    Attributes:
        op: the op of the second trace.
        values: its description in the first and in the second trace.
    """

    op: Any
    values: tuple[str, str]


def compare_replicas(
    first: Trace, second: Trace, distance: int
) -> tuple[TraceDifference | None, Any | None]:
    """Returns the first difference of the losses of two replicas; None without one.

    The second result is an op that makes an integer which differs by the number of the replica, other
    than ctl's positions; None without one.

    Args:
        first: the trace of the first replica of the process.
        second: the trace of another one.
        distance: the difference of the replicas' numbers.
    """
    number = None
    for one, two in zip(first.updates, second.updates, strict=False):
        # What `preprocess` and `sample_weight` returned, which are sources of the losses.
        prepared = _Walk(replica=distance)
        prepared.leaves(_shared(first), _shared(second))
        prepared.rows = _size(one.micro_batches[0]) or 1
        difference = prepared.run(one.inputs, two.inputs)
        if difference is not None:
            return difference, None
        number = number or prepared.number
        comparison = _Walk(replica=distance)
        comparison.leaves(_sources(first, one), _sources(second, two))
        for part, other in zip(one.micro_batches, two.micro_batches, strict=True):
            comparison.rows = _size(part) or 1
            difference = comparison.run(part.losses, other.losses)
            if difference is not None:
                return difference, None
        number = number or comparison.number
    return None, number


def is_replica_number(op: Any) -> bool:
    """Returns whether an op is the constant that a replica context returns as its number."""
    return op.type == "Const" and "replica_id_in_sync_group" in op.name


def compare_micro_batches(trace: Trace) -> TraceDifference | None:
    """Returns the first difference of the losses of a replica's micro-batches; None without one.

    Code may use other ops for another number of rows, so only equal static numbers are compared.
    """
    for update in trace.updates:
        firsts: dict[Any, MicroBatchTrace] = {}
        for other in update.micro_batches:
            first = firsts.setdefault(_size(other), other)
            comparison = _Walk(replica=0)
            values = [value.output for value in trace.global_values]
            shared = symbolic([trace.inputs, update.inputs, values])
            comparison.leaves([*shared, *_leaves(first)], [*shared, *_leaves(other)])
            difference = comparison.run(first.losses, other.losses)
            if difference is not None:
                return difference
    return None


def compare(
    one: Sequence[Any], inputs: Any, two: Sequence[Any], other_inputs: Any
) -> TraceDifference | None:
    """Returns the first difference of two lists of tensors, as functions of their inputs."""
    comparison = _Walk(replica=0)
    comparison.leaves(symbolic(inputs), symbolic(other_inputs))
    return comparison.run(one, two)


def has_equal_parts(update: UpdateTrace) -> bool:
    """Returns whether two micro-batches have the same number of rows, if there are several."""
    sizes = [_size(part) for part in update.micro_batches]
    return len(sizes) < 2 or len({*sizes}) < len(sizes)


def _sources(trace: Trace, update: UpdateTrace) -> list[tf.Tensor]:
    """Returns the tensors that an update's losses depend on, in the same order on all replicas."""
    parts = [(part.rows, part.first_row, part.size) for part in update.micro_batches]
    return [*_shared(trace), *symbolic(parts)]


def _shared(trace: Trace) -> list[tf.Tensor]:
    """Returns the tensors of a replica that are the same function of its rows on all of them."""
    values = [value.output for value in trace.global_values]
    return symbolic([trace.inputs, values, trace.positions])


def _size(part: MicroBatchTrace) -> int | None:
    return part.size if isinstance(part.size, int) else None


def _leaves(part: MicroBatchTrace) -> list[tf.Tensor]:
    return symbolic([part.rows, part.first_row, part.size])


class _Walk:
    """Walks through the ops of two traces side by side.

    Attributes:
        rows: the number of rows of each trace, if it is static.
        number: an op that makes a number which differs by that of the replica.
    """

    def __init__(self, *, replica: int):
        self.rows = 1
        self.number: Any = None
        self._replica = replica
        self._seen: set[tuple[int, int]] = set()
        self._leaves: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._keep: list[Any] = []

    def leaves(self, one: Sequence[tf.Tensor], two: Sequence[tf.Tensor]) -> None:
        """Sets the tensors that the walk does not go beyond, in the same order for both traces."""
        for own, tensors in zip(self._leaves, (one, two), strict=True):
            own.update({id(tensor): i for i, tensor in enumerate(tensors)})
        self._keep.extend([one, two])

    def run(self, one: Sequence[Any], two: Sequence[Any]) -> TraceDifference | None:
        """Returns the first difference of the ops that two lists of tensors are computed from."""
        stack = list(zip(one, two, strict=True))
        while stack:
            pair = stack.pop()
            key = (id(pair[0]), id(pair[1]))
            if pair[0] is pair[1] or key in self._seen:
                continue
            self._seen.add(key)
            self._keep.append(pair)
            if id(pair[0]) in self._leaves[0] and id(pair[1]) in self._leaves[1]:
                continue
            a, b = pair
            if not (hasattr(a, "op") and hasattr(b, "op")):  # eager: variables, tables
                continue
            if a.op.type in _IDENTITIES or b.op.type in _IDENTITIES:
                stack.append(tuple(_skip_identity(x) for x in pair))
                continue
            if a.op.type != b.op.type:
                return TraceDifference(b.op, (a.op.type, b.op.type))
            if a.op.type == "Const":
                values = self._unequal(a.op, b.op)
                if values:
                    return TraceDifference(b.op, values)
            stack.extend(self._inputs(a, b))
        return None

    def _inputs(self, a: tf.Tensor, b: tf.Tensor) -> list[tuple[Any, Any]]:
        if a.op.type == "Placeholder":
            outer = (outer_tensor(a), outer_tensor(b))
            return [] if None in outer else [outer]
        pairs = list(zip(a.op.inputs, b.op.inputs, strict=False))
        if a.op.type in ops.FUNCTIONS:
            graphs = (ops.called_graphs(op) for op in (a.op, b.op))
            for (_, one), (_, two) in zip(*graphs, strict=False):
                if one is not two:
                    pairs.extend(zip(one.outputs, two.outputs, strict=False))
        return pairs

    def _unequal(self, a: Any, b: Any) -> tuple[str, str] | None:
        """Returns the values of two constants, if they differ other than by the replica."""
        one, two = a.get_attr("value"), b.get_attr("value")
        if one == two:
            return None
        if is_replica_number(b):
            self.number = b
            return None
        x, y = tf.make_ndarray(one), tf.make_ndarray(two)
        if x.shape == y.shape and x.dtype.kind in "iu":
            shift = y.astype(int) - x.astype(int)
            # The number of the replica, and the position of its first row.
            allowed = {self._replica * self.rows} | ({self._replica} if not x.any() else set())
            if len(set(shift.flatten().tolist())) == 1 and shift.flatten()[0] in allowed:
                self.number = b
                return None
        return _show(x, y)


def _skip_identity(tensor: tf.Tensor) -> tf.Tensor:
    return tensor.op.inputs[tensor.value_index] if tensor.op.type in _IDENTITIES else tensor


def _show(one: Any, two: Any) -> tuple[str, str]:
    first, second = (" ".join(str(value).split())[:_SHOWN] for value in (one, two))
    return first, second
