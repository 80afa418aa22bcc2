"""Follows the tensors of a graph back to their sources, while the step is traced."""

from collections.abc import Collection, Iterable, Iterator, Sequence
import fractions
import math
import re
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl.graphs import ops

# Ops that move the entries of axis 0 without changing its size.
_REORDERING = ("ReverseV2", "Roll", "ReverseSequence", "RandomShuffle", "SortV2", "While", "Case")
_REDUCING = ("All", "Any", "ArgMax", "ArgMin", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum")
_SELECTING = ("Gather", "GatherV2", "Slice", "StridedSlice")
# Ops whose result has an entry for each entry of one input only.
_INPUTS = {**ops.DATA_INPUT, "MatMul": 0}


class Fold(NamedTuple):
    """How axis 0 of a tensor holds the rows: as [views x rows x per_row, ...]."""

    views: int = 1  # copies of the batch, one after the other
    per_row: int = 1  # consecutive entries of each row

    def by_row(self, tensor: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
        """Turns [entries, ...] into [rows, views, per_row, ...], for a number of rows."""
        inner = tf.shape(tensor)[1:]
        tensor = tf.reshape(tensor, tf.concat([[self.views, count, self.per_row], inner], axis=0))
        return tf.transpose(tensor, [1, 0, 2, *range(3, tensor.shape.rank)])

    def entries(self, rows: tf.Tensor) -> tf.Tensor:
        """Turns [rows, views, per_row, ...] into [entries, ...]."""
        size = (rows.shape[0] or tf.shape(rows)[0]) * self.views * self.per_row
        tensor = tf.transpose(rows, [1, 0, 2, *range(3, rows.shape.rank)])
        return tf.reshape(tensor, tf.concat([[size], tf.shape(rows)[3:]], axis=0))


def depends_on(value: Any, sources: Iterable[tf.Tensor]) -> bool:
    """Returns whether a tensor is computed from one of the sources.

    Values that are read from variables do not depend on what was assigned to these. An operation that
    calls a function depends on all of its inputs.

    Args:
        value: a tensor of the graph that is being traced; an eager tensor depends on nothing.
        sources: tensors of that graph, or of one that encloses it.
    """
    targets = {id(source) for source in sources}
    return any(id(tensor) in targets for tensor in ancestors(value))


def ancestors(
    *values: Any, stop: Collection[int] = (), through_shapes: bool = True
) -> Iterator[tf.Tensor]:
    """Yields tensors of a graph and all that they are computed from; see `depends_on`.

    Args:
        *values: the tensors.
        stop: the ids of tensors that are left out, with what they are computed from.
        through_shapes: whether to follow the inputs of ops that only read their shapes.
    """
    seen, pending = set(stop), list(values)
    while pending:
        tensor = pending.pop()
        if id(tensor) in seen or not hasattr(tensor, "graph"):  # eager
            continue
        seen.add(id(tensor))
        yield tensor
        if not through_shapes and tensor.op.type in ops.SHAPES:
            continue
        is_barrier = tensor.op.type == "XlaOptimizationBarrier"  # its output i is its input i
        pending.extend([tensor.op.inputs[tensor.value_index]] if is_barrier else tensor.op.inputs)
        # A function graph captures the tensors of the enclosing graph as inputs of its own.
        outer = outer_tensor(tensor)
        if outer is not None:
            pending.append(outer)


def captured(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the tensor of the outer graph that an input of a function stands for."""
    captures = getattr(tensor.graph, "captures", ())
    return next(
        (outer for outer, inner in captures if inner is tensor and tf.is_tensor(outer)), None
    )


def outer_tensor(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the graph's tensor that a placeholder stands for; None for variables and eager tensors."""
    outer = captured(tensor) if tensor.op.type == "Placeholder" else None
    is_value = outer is not None and hasattr(outer, "op") and outer.dtype != tf.resource
    return outer if is_value else None


def depends_on_batch(value: tf.Tensor, *, through_shapes: bool = True) -> bool:
    """Returns whether a tensor depends on more than variables and constants; see `ancestors`."""
    return any(
        tensor.op.type in ("IteratorGetNext", "OptionalGetValue")
        or (tensor.op.type == "Placeholder" and captured(tensor) is None)
        for tensor in ancestors(value, through_shapes=through_shapes)
    )


def holds_rows(tensor: tf.Tensor) -> bool:
    """Returns whether the entries of axis 0 are those of a batch, as far as the ops show.

    Another axis, or a variable, may have the same size.
    """
    stack, seen = [tensor], set()
    while stack:
        tensor = stack.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        sources = _sources(tensor)
        stack += sources
        if tensor.op.type in _SELECTING and not any(map(depends_on_batch, sources)):
            sources = []  # rows at constant places, such as those of a micro-batch
        if not sources and not _moves_axis(tensor.op) and depends_on_batch(tensor):
            return True
    return False


def find_fold(tensor: tf.Tensor | None, count: int | tf.Tensor) -> Fold | None:
    """Returns which entries of axis 0 belong to one row.

    Layers fold axes into axis 0: [rows, time, ...] becomes [rows x time, ...], in which the entries of
    a row are consecutive. Views of the rows are concatenated: [views x rows, ...]. A tensor of
    [time x rows, ...] has the same shape, and a variable may have it too. So the ops that computed the
    tensor are searched.

    Args:
        tensor: a tensor of a graph, of shape [entries, ...]; None if it is not known.
        count: the number of rows; a tensor if it is known only when the step runs. In this case, a
            tensor that no op folded counts as rows, which the caller checks when the step runs.

    Returns:
        The fold, or None if the ops do not show it.
    """
    if tensor is None or not hasattr(tensor, "op"):  # eager
        return None
    unfolded = False
    # Depth first, because one input that shows the rows is enough.
    stack, seen = [(tensor, fractions.Fraction(1))], set()
    while stack:
        tensor, factor = stack.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if isinstance(count, int) and tensor.shape.rank and tensor.shape[0] == count:
            if holds_rows(tensor):
                return Fold(1, int(factor)) if factor.denominator == 1 else None
            continue
        if tensor.op.type == "ConcatV2" and tf.get_static_value(tensor.op.inputs[-1]) == 0:
            fold = _join_views([find_fold(x, count) for x in tensor.op.inputs[:-1]], factor)
            if fold:
                return fold
            continue
        sources = _sources(tensor)
        stack += _scaled(reversed(sources), tensor, factor)
        if not sources and not isinstance(count, int):
            unfolded |= factor == 1 and bool(tensor.shape.rank)
            if factor.denominator == 1 and factor > 1:
                return Fold(1, int(factor))
    return Fold() if unfolded else None


def _join_views(parts: Sequence[Fold | None], factor: fractions.Fraction) -> Fold | None:
    """Returns the fold of concatenated views of the rows; None if they have different sizes."""
    sizes = {part.per_row * factor if part else None for part in parts}
    if len(sizes) == 1 and (size := sizes.pop()) and size.denominator == 1:
        return Fold(sum(part.views for part in parts if part), int(size))
    return None


def _scaled(
    sources: Iterable[tf.Tensor], result: tf.Tensor, factor: fractions.Fraction
) -> Iterator[tuple[tf.Tensor, fractions.Fraction]]:
    """Yields the sources whose axis 0 a tensor folds by a known ratio, each with its own factor."""
    for source in sources:
        ratio = _fold(source, result) if result.op.type == "Reshape" else fractions.Fraction(1)
        if ratio is not None:
            yield source, factor * ratio


def _sources(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the inputs of a tensor's op that have the same entries on axis 0."""
    op = tensor.op
    if op.type == "Placeholder":
        outer = captured(tensor)
        return [] if outer is None else [outer]
    if op.type in ("Reshape", "PlaceholderWithDefault"):
        return [op.inputs[0]]
    if op.type in _REORDERING or _moves_axis(op):
        return []
    inputs = [op.inputs[_INPUTS[op.type]]] if op.type in _INPUTS else list(op.inputs)
    size = tensor.shape[0] if tensor.shape.rank else None
    return [x for x in inputs if x.shape.rank and x.shape[0] == size]


def _moves_axis(op: tf.Operation) -> bool:
    """Returns whether axis 0 of an op's result is not axis 0 of its first input."""
    if "Segment" in op.type:
        return True
    if op.type == "Transpose":
        order = tf.get_static_value(op.inputs[1])
        return order is None or order[0] != 0
    if op.type in _REDUCING:
        axes = tf.get_static_value(op.inputs[1])
        return axes is None or bool({0, -(op.inputs[0].shape.rank or 0)} & {*np.ravel(axes)})
    if op.type == "Tile":
        multiples = tf.get_static_value(op.inputs[1])
        if multiples is None:  # as in tf.repeat
            return op.inputs[0].shape[0] is None or op.inputs[0].shape[0] != op.outputs[0].shape[0]
        return bool(multiples[0] != 1)
    if op.type == "MatMul":
        return bool(op.get_attr("transpose_a"))
    if op.type == "Einsum":
        inputs, _, output = op.get_attr("equation").decode().partition("->")
        return not output or not re.match(re.escape(output[0]), inputs)
    return False


def _fold(source: tf.Tensor, result: tf.Tensor) -> fractions.Fraction | None:
    """Returns the factor by which a reshape multiplies the entries of axis 0."""
    if source.shape.is_fully_defined() and result.shape.is_fully_defined():
        if not source.shape.rank or not result.shape.rank or 0 in (*source.shape, *result.shape):
            return None
        return fractions.Fraction(result.shape[0], source.shape[0])
    inner = (source.shape[1:], result.shape[1:])
    if not all(shape.is_fully_defined() and 0 not in shape for shape in inner):
        return None
    return fractions.Fraction(math.prod(inner[0]), math.prod(inner[1]))
