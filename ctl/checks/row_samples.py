"""Rows that the probe makes up: labels and features that differ from those of the first batches.

A loss that combines rows shows it only for some rows, such as positive ones. So the labels of a batch
are moved to other rows, and labels and features become 0, 1, negative, half as large, and the constants
that the losses are compared with. Integers of features must still fit each other, and the code: a length
of 0, or one of another row, may point at the entries of other rows. So only flags become 0 and 1, and
only what is compared and not used otherwise becomes what it is compared with. Of several entries per
row, such as tokens and masks, all but the first become 0, and all rows get those of the first row, such
as its group.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.graphs import ops

_COMPARISONS = ("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual")
# Ops that return the entries of a row, and those for which any integer of a row is possible.
_VIEWS = ("Cast", "ExpandDims", "Identity", "Placeholder", "Reshape", "Squeeze", "StridedSlice")
_ANY_INTEGER = (
    *_COMPARISONS, *ops.SHAPES, "OneHot", "ResourceGather", "SparseSoftmaxCrossEntropyWithLogits",
)  # fmt: skip
_SHIFTS = 5
_MAX_CONSTANTS = 8


class IntegerUses:
    """How a graph uses the integers of a batch, which shows what they may become.

    Args:
        inputs: the tensors of the batch.

    Attributes:
        constants: the numbers that values of the graph are compared with.
    """

    def __init__(self, inputs: Sequence[tf.Tensor]):
        self.constants: set[float] = set()
        # The id of a tensor with the entries of an input -> its position.
        self._views = {id(x): i for i, x in enumerate(inputs) if x.dtype.is_integer}
        # The position of an input -> what it is compared with; the inputs with other uses.
        self._compared: dict[int, set[float]] = {}
        self._used: set[int] = set()

    def add(
        self, tensor: tf.Tensor, inputs: Sequence[tf.Tensor], *, is_alias: bool, is_global: bool
    ) -> None:
        """Notes the op that computes a tensor from others.

        Args:
            tensor: the tensor.
            inputs: what it is computed from.
            is_alias: whether it has the value of its only input.
            is_global: whether it is a value of the global batch.
        """
        kind = tensor.op.type
        views = {id(x): self._views[id(x)] for x in inputs if id(x) in self._views}
        is_view = (is_alias or kind in _VIEWS) and not is_global
        if is_view and [*views] == [*map(id, inputs[:1])]:
            self._views[id(tensor)] = views[id(inputs[0])]
        elif kind not in _ANY_INTEGER:
            self._used.update(views.values())
        if kind in _COMPARISONS and not is_global:
            values = [tf.get_static_value(x) for x in tensor.op.inputs]
            found = {float(x) for x in values if np.ndim(x) == 0 and _is_number(x)}
            self.constants |= found
            for view in views.values():
                self._compared.setdefault(view, set()).update(found)

    def compared(self, labels: Sequence[bool]) -> dict[int, set[float]]:
        """Returns the numbers that each label, or input without another use, is compared with."""
        return {i: v for i, v in self._compared.items() if labels[i] or i not in self._used}


def vary(
    batch: Sequence[np.ndarray],
    labels: Sequence[bool],
    constants: Collection[float],
    flags: Sequence[bool],
    compared: Mapping[int, Collection[float]],
) -> Iterator[list[np.ndarray]]:
    """Yields batches of the same shapes.

    Args:
        batch: [rows, ...] each.
        labels: which of them are labels.
        constants: numbers that rows are compared with.
        flags: which of them may be set if they are integers, see `is_flag`.
        compared: position of an entry that is only compared -> the numbers that it is compared with.
    """
    free = [one or two for one, two in zip(labels, flags, strict=True)]
    pairs = [*zip(batch, labels, free, strict=True)]
    # Entries of a group get the same change, so that they still fit each other.
    for shift in range(_SHIFTS):
        yield [
            _mix(_candidates(x, label=label, free=may), shift if label else 2 * shift + 1)
            for x, label, may in pairs
        ]
    yield [np.roll(x, 1, axis=0) if label else x for x, label, _ in pairs]
    yield [x if label or x.dtype.kind in "fV" else x[[0] * len(x)] for x, label, _ in pairs]
    # Of one number per row, most others above are 0.
    yield [
        np.ones_like(x) if label or (x.ndim == 1 and (may or x.dtype.kind == "f")) else x
        for x, label, may in pairs
    ]
    yield from _vary_compared(batch, [_around(compared.get(i, ())) for i in range(len(batch))])
    near = _around(constants)
    for shift in range(0, len(near), len(batch[0])):
        yield [_mix([*_near(x, near, label=label, free=may), x], shift) for x, label, may in pairs]


def _vary_compared(
    batch: Sequence[np.ndarray], numbers: Sequence[Sequence[float]]
) -> Iterator[list[np.ndarray]]:
    """Yields batches in which several rows get the same number: only some of them may be selected."""
    own = [[*_near(x, n, label=True, free=True), x] for x, n in zip(batch, numbers, strict=True)]
    for i in range(max(map(len, own)) - 1):
        yield [_mix([each[i % len(each)], each[-1]], 0, repeats=3) for each in own]


def is_flag(x: np.ndarray) -> bool:
    """Returns whether an entry has one integer per row, which is 0, 1 or -1."""
    return x.dtype.kind in "iub" and x.ndim == 1 and bool((np.abs(x.astype(int)) <= 1).all())


def _is_number(value: Any) -> bool:
    return value is not None and np.asarray(value).dtype.kind in "iuf" and np.isfinite(value)


def _candidates(x: np.ndarray, *, label: bool, free: bool) -> list[np.ndarray]:
    """Returns what the rows of an entry may become."""
    zeros, ones = np.zeros_like(x), np.ones_like(x)
    if x.dtype.kind in "fV":  # V: bfloat16
        # Not larger: a sum of exponentials minus the maximum of the batch would underflow.
        return [x, ones, zeros, -x, x / 2] if label else [x, x / 2, -x, zeros, ones]
    if x.dtype.kind not in "iub" or (x.dtype == np.uint8 and x.ndim > 2):  # an image
        return [x]
    if not free:
        ones, first = x, x.reshape(len(x), -1)[:, :1]
        zeros.reshape(len(x), -1)[:, :1] = first
    return [x, ones, zeros]


def _near(x: np.ndarray, values: Sequence[float], *, label: bool, free: bool) -> list[np.ndarray]:
    """Returns entries that are equal to, or near, constants of the code."""
    is_float = x.dtype.kind == "f" and (label or x.ndim == 1)
    if not is_float and not (x.dtype.kind in "iu" and free):
        return []
    exact = (np.asarray(v).astype(x.dtype) for v in values)
    return [np.full_like(x, e) for e, v in zip(exact, values, strict=True) if e == v]


def _around(constants: Collection[float]) -> list[float]:
    return [v + d for v in sorted(constants)[:_MAX_CONSTANTS] for d in (0, 1, -1)]


def _mix(candidates: Sequence[np.ndarray], shift: int, repeats: int = 1) -> np.ndarray:
    """Takes each row, or each few rows, from another candidate, in turns."""
    count = len(candidates[0])
    return np.stack([candidates[(i // repeats + shift) % len(candidates)][i] for i in range(count)])
