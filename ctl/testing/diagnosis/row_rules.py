"""Recognizes values of a row that depend on its replica, before anything is summed over the rows."""

from collections.abc import Sequence

import numpy as np

from ctl.testing.diagnosis import causes
from ctl.testing.diagnosis.evidence import Evidence
from ctl.testing.splits import Split
from ctl.testing.subjects.base import RowValues, Subject


def explain_draws(evidence: Evidence, split: Split, *, training: bool = True) -> str | None:
    """Returns how the random numbers of a row depend on the split, or None if they do not.

    If all rows are equal, only random numbers can make their outputs different.
    """
    if split.replicas < 2:
        return None
    rows = _rows(evidence.subject.select([0] * evidence.subject.count), split, training)
    if rows is None:
        return None
    reference, values = rows
    drawn = [*reference.outputs, reference.losses]
    if all(close(v, v[:1].repeat(len(v), 0)) for v in drawn):
        return None
    if _all_close(drawn, [*values.outputs, values.losses]):
        return None
    first, *others = values.by_replica
    same_numbers = all(_all_close(first, other) for other in others)
    return causes.SAME_NUMBERS if same_numbers else causes.OTHER_NUMBERS


def explain_rows(evidence: Evidence, split: Split, *, training: bool = True) -> str | None:
    """Returns which method computes a row's values from the other rows of its replica."""
    rows = _rows(evidence.subject, split, training)
    if rows is None:
        return None
    reference, values = rows
    if not _all_close(reference.outputs, values.outputs):
        return causes.FORWARD
    if not close(reference.losses, values.losses):
        return causes.PER_EXAMPLE.format(hook="per_example_loss")
    if not close(reference.weights, values.weights):
        return causes.PER_EXAMPLE.format(hook="sample_weight")
    return None


def _rows(subject: Subject, split: Split, training: bool) -> tuple[RowValues, RowValues] | None:
    """Returns the first batch's rows on one replica and on a split, or None if unknown."""
    reference = subject.rows(split.reference, training=training)
    values = subject.rows(split, training=training) if reference else None
    return (reference, values) if reference and values else None


def _all_close(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(close(a, b) for a, b in zip(values, others, strict=True))


def close(values: np.ndarray, others: np.ndarray) -> bool:
    """Returns whether two arrays are equal up to rounding errors of float32."""
    if values.shape != others.shape:
        return False
    # The minimum of 0.1 is for values that should be zero: they are rounding errors only.
    return bool(np.allclose(values, others, rtol=0, atol=1e-5 * np.abs(values).max(initial=0.1)))
