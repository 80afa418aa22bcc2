"""Recognizes values of a row that depend on its replica, before anything is summed over the rows."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from ctl.testing.diagnosis import causes
from ctl.testing.diagnosis.evidence import Evidence
from ctl.testing.splits import Split


def explain_draws(evidence: Evidence, split: Split, *, training: bool = True) -> str | None:
    """Returns how the random numbers of a row depend on the split, or None if they do not.

    If all rows are equal, only random numbers can make their outputs different.
    """
    if split.replicas < 2:
        return None
    examples = evidence.spec.examples
    equal = {name: values[:1].repeat(split.batch, 0) for name, values in examples.items()}
    spec = dataclasses.replace(evidence.spec, examples=equal)
    rows = dataclasses.replace(evidence, spec=spec).rows(split, training=training)
    if rows is None:
        return None
    reference, values = rows
    drawn = [*reference.outputs, reference.losses]
    if all(_is_constant(v) for v in drawn):
        return None
    if _all_close(drawn, [*values.outputs, values.losses]):
        return None
    first, *others = values.by_replica
    same_numbers = all(_all_close(first, other) for other in others)
    return causes.SAME_NUMBERS if same_numbers else causes.OTHER_NUMBERS


def explain_rows(evidence: Evidence, split: Split, *, training: bool = True) -> str | None:
    """Returns which method computes a row's values from the other rows of its replica."""
    rows = evidence.rows(split, training=training)
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


def _is_constant(values: np.ndarray) -> bool:
    return close(values, values[:1].repeat(len(values), 0))


def _all_close(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(close(a, b) for a, b in zip(values, others, strict=True))


def close(values: np.ndarray, others: np.ndarray) -> bool:
    """Returns whether two arrays are equal up to rounding errors of float32."""
    if values.shape != others.shape:
        return False
    # The minimum of 0.1 is for values that should be zero: they are rounding errors only.
    return bool(np.allclose(values, others, rtol=0, atol=1e-5 * np.abs(values).max(initial=0.1)))
