"""Records the values that a loop computes on one split as arrays."""

from collections.abc import Iterator, Mapping
import dataclasses

import numpy as np
import tensorflow as tf

from ctl.data.source import Nest
from ctl.testing.contents import Name, Names, is_local
from ctl.testing.splits import Split


@dataclasses.dataclass(frozen=True)
class CopyMismatch:
    """A variable whose copies on the replicas differ after a step.

    Attributes:
        name: kind and name of the variable.
        step: the step after which they differ.
        distance: the largest absolute difference of an element.
        changed: the replicas whose copy the step changed.
        replicas: number of replicas.
    """

    name: Name
    step: int
    distance: float
    changed: tuple[int, ...]
    replicas: int


@dataclasses.dataclass(frozen=True)
class LoopRecord:
    """The values that a loop computed on one split.

    Attributes:
        split: the split.
        start: the variables before the first step.
        steps: for each step, quantity -> value; an "update" is the change of a trainable variable.
        evaluation: results of an evaluation with the initial weights, if it was made.
        mismatches: the variables whose copies differ.
        names: the variables in order, before the first step and after the last one: an optimizer may
            create its slots in the first step.
    """

    split: Split
    start: Mapping[Name, np.ndarray]
    steps: list[dict[Name, np.ndarray]]
    evaluation: dict[Name, np.ndarray]
    mismatches: list[CopyMismatch]
    names: tuple[Names, ...] = ()

    def flat_update(self, step: int = 0) -> np.ndarray:
        """Returns all elements of the updates of a step."""
        values = [v.ravel() for (kind, _), v in self.steps[step].items() if kind == "update"]
        return np.concatenate(values) if values else np.zeros(0)

    @property
    def trains(self) -> bool:
        """Whether a step changed a trainable variable."""
        return any(self.flat_update(step).any() for step in range(len(self.steps)))


def find_mismatches(
    name: Name, step: int, old: list[np.ndarray], new: list[np.ndarray], variable: tf.Variable
) -> list[CopyMismatch]:
    """Returns how the replicas' copies of a variable differ after a step; [] if they do not.

    Args:
        name: kind and name of the variable.
        step: the step.
        old: the copies before it.
        new: the copies after it.
        variable: the variable.
    """
    # A local variable that is summed has a different part of the sum on each replica.
    if is_local(variable) and variable.aggregation == tf.VariableAggregation.SUM:
        return []
    if all(np.array_equal(copy, new[0], equal_nan=True) for copy in new):
        return []
    pairs = enumerate(zip(old, new, strict=True))
    changed = tuple(r for r, (before, after) in pairs if not np.array_equal(before, after))
    wide = [copy.astype(np.float64) for copy in new]
    distance = max(float(np.abs(copy - wide[0]).max(initial=0.0)) for copy in wide)
    return [CopyMismatch(name, step, distance, changed, len(new))]


def flatten_numbers(outputs: Nest, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name, such as "group/name", and the value of each number of nested dicts."""
    for name, value in outputs.items():
        if isinstance(value, dict):
            yield from flatten_numbers(value, f"{prefix}{name}/")
            continue
        array = np.asarray(value)
        if array.dtype.kind in "fiub":
            yield f"{prefix}{name}", array.astype(np.float64)
