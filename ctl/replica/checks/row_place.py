"""The place of a batch's rows in a tensor, and functions that the rules of ops share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


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


class CombinesRows(Exception):
    """An op combines several rows, or may do so."""


def align(op: Any, states: States, rank: int | None) -> Rows:
    """Returns the common place of the rows in inputs that are aligned at their last axes."""
    places = set()
    for tensor, state in zip(op.inputs, states, strict=True):
        if state is not None:
            own = tensor.shape.rank
            if rank is None or own is None:
                raise CombinesRows
            places.add(state._replace(axis=state.axis + rank - own))
    return single(places)


def single(places: set[Rows]) -> Rows:
    """Returns the only place; raises CombinesRows if there are none or several."""
    if len(places) != 1:
        raise CombinesRows
    return places.pop()


def same_place(op: Any, states: States, count: int | None) -> Rows:
    """Returns the place of the rows if all inputs with rows have the same."""
    return single({state for state in states if state is not None})


def first(states: States) -> Rows:
    """Returns the place of the rows in the only input that has some."""
    return single({state for state in states if state is not None})


def only(states: States, position: int) -> Rows:
    """Returns the place in one input; raises CombinesRows if another input depends on the batch."""
    check(not any(states[:position]) and not any(states[position + 1 :]))
    return first(states)


def rank_of(tensor: tf.Tensor) -> int:
    """Returns the static rank."""
    check(tensor.shape.rank is not None)
    return int(tensor.shape.rank)


def static(tensor: tf.Tensor) -> Any:
    """Returns the value of a constant."""
    value = tf.get_static_value(tensor)
    check(value is not None)
    return value


def check(condition: bool) -> None:
    """Raises CombinesRows unless the condition holds."""
    if not condition:
        raise CombinesRows
