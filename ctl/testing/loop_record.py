"""Records the values that a loop computes on one split as arrays."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.testing.contents import Name, Names, is_local, read_all, read_value
from ctl.testing.logical_devices import copies
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
class Record:
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


def record_steps(
    strategy: tf.distribute.Strategy,
    split: Split,
    train: Callable[[int], Mapping[Name, np.ndarray]],
    name_all: Callable[[], Mapping[Name, tf.Variable]],
    *,
    steps: int,
) -> Record:
    """Records the values that any training loop computes.

    Args:
        strategy: the strategy of the variables.
        split: the split.
        train: trains the step with this number, from 0, and returns what it reports.
        name_all: returns all variables by their names; a step may create some.
        steps: number of training steps.
    """
    named = first_named = name_all()
    start = read_all(strategy, named)
    values, records, mismatches = dict(start), [], []
    for step in range(steps):
        old = {name: copies(strategy, v) for name, v in named.items()}
        quantities = dict(train(step))
        named = name_all()  # with those that this step created
        for name, variable in named.items():
            value, new = read_value(strategy, variable), copies(strategy, variable)
            is_update = name[0] == "update" and name in values
            quantities[name] = value - values[name] if is_update else value
            values[name] = value
            if name[0] != "metric":  # each replica counts its own rows
                mismatches += _copy_mismatches(name, step, old.get(name, new), new, variable)
        records.append(quantities)
    return Record(split, start, records, {}, mismatches, (tuple(first_named), tuple(named)))


def _copy_mismatches(
    name: Name, step: int, old: list[np.ndarray], new: list[np.ndarray], variable: tf.Variable
) -> list[CopyMismatch]:
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


def flatten_numbers(outputs: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name, such as "group/name", and the value of each number of nested dicts."""
    for name, value in outputs.items():
        if isinstance(value, dict):
            yield from flatten_numbers(value, f"{prefix}{name}/")
            continue
        array = np.asarray(value)
        if array.dtype.kind in "fiub":
            yield f"{prefix}{name}", array.astype(np.float64)
