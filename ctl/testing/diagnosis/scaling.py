"""Recognizes mistakes by how much each part counts in an update. Pure arithmetic on records."""

from collections.abc import Mapping
import itertools
from typing import TYPE_CHECKING

import numpy as np

from ctl.testing.diagnosis import causes
from ctl.testing.report import as_fraction, common_factor
from ctl.testing.splits import RATE, Split

if TYPE_CHECKING:
    from ctl.testing.diagnosis.probes import Coefficients
    from ctl.testing.recording import Record

_CLOSE = 1e-4  # relative; coefficients solve a least-squares problem and lose digits


def explain_coefficients(coefficients: Mapping[Split, "Coefficients"], split: Split) -> str | None:
    """Returns the cause that gives rows, regularization and weights their coefficients.

    Args:
        coefficients: the coefficients of the first split that differs, and of an uneven split if any.
        split: the first split that differs.
    """
    first = coefficients[split]
    if _all_close(first.rows, 1.0):
        return _explain_other_terms(first)
    uneven = next((each for each in coefficients if not each.even), None)
    cause = _explain_uneven_rows(coefficients[uneven].rows, uneven) if uneven else None
    if cause and split.micro_batches == 1:
        return cause
    if _all_close(first.rows, first.rows[0]):
        return _explain_common_factor(float(first.rows[0]), split)
    sizes = _micro_batch_sizes(split)
    if split.replicas == 1 and _all_close(first.rows * sizes, first.rows[0] * sizes[0]):
        return causes.MICRO_BATCH
    factors = ", ".join(as_fraction(float(factor)) for factor in first.rows)
    return causes.DENOMINATOR.format(times=factors)


def explain_clipping(
    records: Mapping[Split, "Record"], references: Mapping[int, "Record"], split: Split
) -> str | None:
    """Recognizes that each replica clips its own gradients.

    Updates of different batches have the same norm only if the gradients are clipped to it.
    """
    norms = [_update_norm(r, step) for r in references.values() for step in (0, -1)]
    if min(norms) <= 0 or max(norms) / min(norms) > 1 + 1e-6 or len(set(norms)) < 2:
        return None
    factor = _update_norm(records[split], 0) / norms[0]
    if abs(factor - 1) < 1e-6 and split.replicas > 1:
        return None
    return causes.CLIPPED.format(norm=norms[0] / RATE, times=as_fraction(factor))


def explain_partial(
    records: Mapping[Split, "Record"], references: Mapping[int, "Record"]
) -> str | None:
    """Recognizes a term of the loss that grows with the number of replicas while others do not.

    The error of the update on N replicas is then `factor(N) - 1` times one fixed vector: 1 and 3
    times on 2 and 4 replicas if each replica adds the complete term.
    """
    errors: dict[int, np.ndarray] = {}
    batch = next((s.batch for s in records if s.even and s.replicas > 1), None)
    for split, record in records.items():
        if split.batch == batch and split.even and split.micro_batches == 1 and split.replicas > 1:
            errors[split.replicas] = _flat_update(record, 0) - _flat_update(references[batch], 0)
    for few, many in itertools.pairwise(sorted(errors)):
        factor = common_factor(errors[many], errors[few], 1e-5)
        if factor is None:
            continue
        if abs(factor - (many - 1) / (few - 1)) < _CLOSE:
            return causes.PART_SUMMED
        if abs(factor - (1 - 1 / many) / (1 - 1 / few)) < _CLOSE:
            return causes.PART_AVERAGED
    return None


def _explain_other_terms(coefficients: "Coefficients") -> str | None:
    """Returns the cause if every row counts as it should."""
    if abs(coefficients.penalty - 1) > _CLOSE:
        return causes.PENALTY.format(times=as_fraction(coefficients.penalty))
    expected = coefficients.reference_decay
    if expected and abs(coefficients.extra_decay) > _CLOSE * abs(expected):
        times = 1 + coefficients.extra_decay / expected
        return causes.DECAY.format(times=as_fraction(times))
    return None


def _explain_uneven_rows(rows: np.ndarray, split: Split) -> str | None:
    """Returns the cause from the coefficients of the rows of an uneven batch."""
    sizes = np.repeat(split.row_counts, split.row_counts)
    if split.micro_batches == 1 and _all_close(rows * sizes, rows[0] * sizes[0]):
        how = "summed" if _all_close(rows * sizes, split.batch) else "averaged"
        return causes.OWN_ROWS.format(how=how)
    if len(rows) > 1 and _all_close(rows[:-1], rows[0]) and rows[-1] > rows[0] * (1 + _CLOSE):
        cause = causes.PADDING if _all_close(rows[:1], 1.0) else causes.PADDING_MEAN
        return cause.format(times=as_fraction(float(rows[-1] / rows[0])))
    return None


def _explain_common_factor(factor: float, split: Split) -> str | None:
    """Returns the cause if all rows have the same coefficient."""
    known = [
        (split.replicas, causes.REDUCED_TWICE),
        (1 / split.replicas, causes.AVERAGED),
        (split.micro_batches, causes.MICRO_BATCH),
        (1 / split.micro_batches, causes.MICRO_BATCH_TWICE),
    ]
    matches = (cause for value, cause in known if value != 1 and abs(factor / value - 1) < _CLOSE)
    return next(matches, None)


def _micro_batch_sizes(split: Split) -> np.ndarray:
    """Returns [batch] numbers of rows in the micro-batch of each row, on one replica."""
    rows = split.rows_per_replica
    cuts = [rows * i // split.micro_batches for i in range(split.micro_batches + 1)]
    return np.repeat(np.diff(cuts), np.diff(cuts)).astype(float)


def _flat_update(record: "Record", step: int) -> np.ndarray:
    values = [v.ravel() for (kind, _), v in record.steps[step].items() if kind == "update"]
    return np.concatenate(values) if values else np.zeros(0)


def _update_norm(record: "Record", step: int) -> float:
    return float(np.linalg.norm(_flat_update(record, step)))


def _all_close(values: np.ndarray, expected: float) -> bool:
    return bool(np.abs(values - expected).max(initial=0.0) <= _CLOSE * max(abs(expected), 1e-12))
