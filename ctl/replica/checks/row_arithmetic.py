"""Rules for ops that compute with values: one per kind of op, for the place of a batch's rows.

A rule gets the op, where its inputs hold the rows, and the number of rows if it is static. It returns
where all outputs, or each of them, hold the rows, and raises `CombinesRows` otherwise.
"""

import math
from typing import Any

from ctl.replica.checks import row_ops
from ctl.replica.checks.row_place import (
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


def elementwise(op: Any, states: States, count: int | None) -> Rows:
    """Ops that broadcast their inputs."""
    return align(op, states, op.outputs[0].shape.rank)


def select(op: Any, states: States, count: int | None) -> Rows:
    """A choice by a condition."""
    # tf.compat.v1.where with a vector selects entries of axis 0.
    vector = op.inputs[0].shape.rank == 1
    return same_place(op, states, count) if vector else elementwise(op, states, count)


def fused_batch_norm(op: Any, states: States, count: int | None) -> list[Rows | None]:
    """A normalization; on the axis of the rows, only with given statistics."""
    state, others = only(states, 0), len(op.outputs) - 1
    # tf_keras' LayerNormalization has the rows on the axis of channels.
    if state.axis == (1 if op.get_attr("data_format") == b"NCHW" else rank_of(op.inputs[0]) - 1):
        return [state, *[state._replace(axis=0)] * others]
    check(state.axis == 0 and not op.get_attr("is_training"))
    return [state, *[None] * others]


def trailing(op: Any, states: States, count: int | None) -> Rows:
    """Ops on the last axes."""
    state = same_place(op, states, count)
    check(state.axis < rank_of(op.inputs[0]) - row_ops.TRAILING_AXES[op.type])
    return state


def reduction(op: Any, states: States, count: int | None) -> Rows:
    """A reduction of axes other than the axis of the rows."""
    state, rank = first(states), rank_of(op.inputs[0])
    axes = {int(axis) % rank for axis in static(op.inputs[1]).flatten()}
    check(state.axis not in axes)
    keeps = not op.type.startswith("Arg") and op.get_attr("keep_dims")
    return state if keeps else state._replace(axis=state.axis - sum(a < state.axis for a in axes))


def scan(op: Any, states: States, count: int | None) -> Rows:
    """Ops along the axes of the second input."""
    state, rank = first(states), rank_of(op.inputs[0])
    check(all(int(axis) % rank != state.axis for axis in static(op.inputs[1]).flatten()))
    return state


def roll(op: Any, states: States, count: int | None) -> Rows:
    """A roll along axes other than the axis of the rows."""
    state, rank = first(states), rank_of(op.inputs[0])
    check(all(int(axis) % rank != state.axis for axis in static(op.inputs[2]).flatten()))
    return state


def matmul(op: Any, states: States, count: int | None) -> Rows:
    """A product of matrices that does not contract the axis of the rows."""
    batch = op.type != "MatMul"
    flags = ("adj_x", "adj_y") if batch else ("transpose_a", "transpose_b")
    rank, places = rank_of(op.outputs[0]), set()
    for i, (tensor, state) in enumerate(zip(op.inputs, states, strict=True)):
        if state is None:
            continue
        from_end = rank_of(tensor) - 1 - state.axis  # 0 or 1: an axis of the matrices
        if from_end < 2:
            transposed = int(op.get_attr(flags[i]))
            check(from_end == (transposed if i else 1 - transposed))  # otherwise it is contracted
            from_end = 1 - i
        places.add(state._replace(axis=rank - 1 - from_end))
    return single(places)


def einsum(op: Any, states: States, count: int | None) -> Rows:
    """A product whose result has the label of the rows."""
    inputs, _, output = op.get_attr("equation").decode().replace(" ", "").partition("->")
    labels, places = _labels(output, rank_of(op.outputs[0])), set()
    for term, tensor, state in zip(inputs.split(","), op.inputs, states, strict=True):
        if state is not None:
            label = _labels(term, rank_of(tensor))[state.axis]
            check(label in labels)
            places.add(state._replace(axis=labels.index(label)))
    return single(places)


def _labels(term: str, rank: int) -> list[Any]:
    """Returns the label of each axis; the labels of an ellipsis are numbered from its end."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *range(-hidden, 0), *after]


def one_hot(op: Any, states: States, count: int | None) -> Rows:
    """Indicators of the entries of the first input."""
    state, axis = only(states, 0), op.get_attr("axis")
    return state._replace(axis=state.axis + (0 <= axis <= state.axis))


def lookup(op: Any, states: States, count: int | None) -> Rows:
    """The entries of a table."""
    return only(states, 1)


def cudnn(op: Any, states: States, count: int | None) -> Rows:
    """A recurrent network, [time, rows, ...]."""
    state = same_place(op, states, count)
    check(state.axis == 1 and op.get_attr("time_major"))
    return state


def space_to_batch(op: Any, states: States, count: int | None) -> Rows:
    """Blocks of positions that become blocks of the first axis, and back."""
    state, blocks = leading(op, states, count), math.prod(static(op.inputs[1]).tolist())
    if op.type == "SpaceToBatchND":
        return state._replace(outer=state.outer * blocks)
    check(state.outer % blocks == 0)
    return state._replace(outer=state.outer // blocks)


def list_item(op: Any, states: States, count: int | None) -> Rows:
    """A tensor out of a list."""
    state = only(states, 0)
    return state._replace(axis=state.axis + (op.type == "TensorListStack"), listed=False)


def list_from_tensor(op: Any, states: States, count: int | None) -> Rows:
    """The entries of axis 0, as a list."""
    state = only(states, 0)
    check(state.axis > 0)  # otherwise each item of the list is a row
    return state._replace(axis=state.axis - 1, listed=True)


def list_set(op: Any, states: States, count: int | None) -> Rows:
    """A list with one more tensor."""
    if op.type == "TensorListSetItem":
        check(states[1] is None)
    places = {s._replace(listed=True) for s in (states[0], states[-1]) if s is not None}
    return single(places)


def list_pop(op: Any, states: States, count: int | None) -> list[Rows | None]:
    """A list and its last tensor."""
    state = only(states, 0)
    return [state, state._replace(listed=False)]


def list_same(op: Any, states: States, count: int | None) -> Rows:
    """The same list with another length."""
    return only(states, 0)


def identities(op: Any, states: States, count: int | None) -> list[Rows | None]:
    """The inputs themselves."""
    return list(states)


def leading(op: Any, states: States, count: int | None) -> Rows:
    """Ops that have the rows on axis 0."""
    position = row_ops.DATA_INPUT.get(op.type)
    state = same_place(op, states, count) if position is None else only(states, position)
    check(state.axis == 0)
    return state
