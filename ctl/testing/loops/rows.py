"""Measures how much each row of a global batch counts in the update of a loop."""

import numpy as np

from ctl.testing.diagnosis.probes import Coefficients
from ctl.testing.loops.protocol import LoopSplit
from ctl.testing.loops.runner import LoopRun, LoopSpec, State
from ctl.testing.recording import Name, Record

_ERROR = {"float64": 1e-5, "float32": 1e-3}  # relative, of the least-squares solution


class RowUpdates:
    """The updates of the loop for each row alone, with a global batch size of 1.

    Under plain SGD the update of a batch on one replica is the mean of them, unless the rows depend on
    each other, as with batch normalization.

    Args:
        spec: what to run.
        state: the state before each update.
        count: the number of rows, from the first.
    """

    def __init__(self, spec: LoopSpec, state: State, count: int):
        run = LoopRun(spec, LoopSplit(1))
        columns = []
        for row in range(count):
            run.set_state(state)
            before = _flatten(run)
            run.train([row])
            columns.append(_flatten(run) - before)
        run.set_state(state)
        self._rows = np.stack(columns, axis=1)
        self._weights = _one_column_per_variable(run)
        self._error = _ERROR[spec.precision]

    def coefficients(self, record: Record, reference: Record) -> Coefficients | None:
        """Returns how much each row counts relative to one replica, or None if there is no solution.

        Args:
            record: the record of a split.
            reference: the record of the same global batch on one replica.
        """
        expected, actual = self._solve(reference), self._solve(record)
        count = record.split.batch
        if expected is None or actual is None or not np.abs(expected[:count]).min() > 0:
            return None
        extra = np.abs(actual[count:] - expected[count:]).max(initial=0.0)
        return Coefficients(actual[:count] / expected[:count], 1.0, float(extra), 0.0)

    def _solve(self, record: Record) -> np.ndarray | None:
        """Returns the coefficient of each row, and of the weights of each variable."""
        values = [v.ravel() for (kind, _), v in record.steps[0].items() if kind == "update"]
        target = np.concatenate(values).astype(np.float64)
        matrix = np.concatenate([self._rows[:, : record.split.batch], self._weights], axis=1)
        norms = np.linalg.norm(matrix, axis=0)
        used = norms > 0
        if not np.isfinite(matrix).all() or not np.isfinite(target).all():
            return None
        solution, _, rank, _ = np.linalg.lstsq(matrix[:, used] / norms[used], target, rcond=1e-9)
        error = np.linalg.norm(matrix[:, used] / norms[used] @ solution - target)
        if rank < used.sum() or error > self._error * np.linalg.norm(target):
            return None
        result = np.zeros(len(norms))
        result[used] = solution / norms[used]
        return result


def _updated(run: LoopRun) -> dict[Name, np.ndarray]:
    named = run.contents.name_variables()
    return {name: np.asarray(v, np.float64) for name, v in named.items() if name[0] == "update"}


def _flatten(run: LoopRun) -> np.ndarray:
    return np.concatenate([value.ravel() for value in _updated(run).values()])


def _one_column_per_variable(run: LoopRun) -> np.ndarray:
    values = [value.ravel() for value in _updated(run).values()]
    columns = np.zeros([sum(map(len, values)), len(values)])
    start = 0
    for i, value in enumerate(values):
        columns[start : start + len(value), i] = value
        start += len(value)
    return columns
