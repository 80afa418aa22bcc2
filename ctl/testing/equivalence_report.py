"""The result of comparing splits."""

import dataclasses

import numpy as np

from ctl.errors import UsageError
from ctl.testing.splits import Split

_LISTED = 12  # differences in a message


class NotComparable(UsageError):
    """The batches or the splits leave nothing to compare; this is no mistake of the loop."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One quantity that depends on how the global batch was split.

    Attributes:
        kind: "loss", "update", "statistic", "state", "metric", "evaluation", "copy" or "probe".
        name: name of the quantity, such as "dense/kernel:0".
        split: the split on which it differs from its value on one replica.
        step: the training step, from 0.
        factor: the ratio to the value on one replica if all elements have the same; else None.
        distance: the largest absolute difference of an element.
    """

    kind: str
    name: str
    split: Split
    step: int
    factor: float | None
    distance: float

    def has_factor(self, factor: float) -> bool:
        """Returns whether the value is `factor` times, and not equal to, the value on one replica."""
        return self.factor is not None and factor != 1 and abs(self.factor / factor - 1) < 1e-5

    def __str__(self) -> str:
        """Returns a line such as `update of w:0 on 2 replicas (...), step 0: 2 times the value ...`."""
        labels = {"update": "update of ", "copy": "copies of ", "state": "variable ", "loss": ""}
        label = f"{labels.get(self.kind, self.kind + ' ')}{self.name}"
        how = self._describe("the value on one replica")
        if self.kind == "evaluation":  # an evaluation neither accumulates nor trains
            return f"{label} on {self.split.replica_rows}: {how}"
        return f"{label} on {self.split}, step {self.step}: {how}"

    def brief(self) -> str:
        """Returns a short line such as `w:0 on 2 + 2 rows: 2 times that of one replica`."""
        rows = " + ".join(map(str, self.split.row_counts))
        return f"{self.name} on {rows} rows: {self._describe('that of one replica')}"

    def _describe(self, reference: str) -> str:
        if self.kind == "copy":
            return f"the replicas' copies differ by up to {self.distance:.3g}"
        if self.factor is None or abs(self.factor - 1) < 1e-3:
            return f"differs from {reference} by up to {self.distance:.3g}"
        return f"{as_fraction(self.factor)} times {reference}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The splits that were compared, their differences, and the likely cause.

    Attributes:
        trainer: name of the trainer or the loop.
        precision: dtype of the computation.
        compared: the splits that were compared.
        refused: the splits that are not compared, with the reason.
        errors: the splits on which the user's code raises an exception, with its line and message, or on
            which a check of ctl rejects it, with the message of the check.
        why: why the tolerance is not the one for float64; "" if it is.
        undecided: why the differences cannot be interpreted; "" if they could be compared.
        notes: what else could not be checked, and why.
        differences: the differences; empty if the loop is right.
        cause: the likely cause of the first difference or error; "" if none is known.
    """

    trainer: str
    precision: str
    compared: tuple[Split, ...]
    refused: dict[Split, str]
    notes: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    cause: str = ""
    errors: dict[Split, str] = dataclasses.field(default_factory=dict)
    why: str = ""
    undecided: str = ""

    @property
    def equivalent(self) -> bool:
        """Whether every quantity is computed, and is the same, on every split."""
        return not self.differences and not self.errors and not self.undecided

    @property
    def verdict(self) -> str:
        """Returns "equivalent", "differs", or "cannot tell"."""
        if self.differences or self.errors:
            return "differs"
        return "cannot tell" if self.undecided else "equivalent"

    @property
    def headline(self) -> tuple[str, str]:
        """The difference or the exception to report first, and what to do about it."""
        if self.differences:
            return str(self.differences[0]), self.cause
        if not self.errors:
            return "cannot tell", f"The splits cannot be compared: {self.undecided}."
        split, error = next(iter(self.errors.items()))
        return f"fails on {split}: {error}", self.cause or (
            "The same batch works on one replica. The step must work on any number of replicas, and for "
            "any number of rows of a replica, also for one."
        )

    def failure(self) -> str:
        """Returns the error message: the difference with its cause, then the other differences."""
        first, fix = self.headline
        others = self.differences[1:_LISTED]
        lines = [f"{self.trainer}: {first}. {fix}"]
        lines += ["  Other differences:"] * bool(others)
        lines += [f"    {difference}" for difference in others]
        if len(self.differences) > _LISTED:
            lines.append(f"    and {len(self.differences) - _LISTED} more")
        lines += [f"  Fails on {split}: {error}" for split, error in self.errors.items()]
        lines += [f"  Not compared: {split}: {reason}" for split, reason in self.refused.items()]
        lines += [f"  {note}" for note in self.notes]
        if self.why:
            lines.append(f"  The tolerance is that of float32: {self.why}")
        return "\n".join(lines)


class ReportError(Exception):
    """The splits are not equivalent.

    Args:
        report: the report of the comparison.
    """

    def __init__(self, report: Report):
        super().__init__(report.failure())
        self.report = report


class UndecidedError(ReportError, NotComparable):
    """The splits cannot be compared."""


class DifferenceError(ReportError, AssertionError):
    """The splits differ."""


def check_report(report: Report) -> Report:
    """Returns a report of equivalent splits; raises an error of another one."""
    if report.verdict == "cannot tell":
        raise UndecidedError(report)
    if not report.equivalent:
        raise DifferenceError(report)
    return report


def as_fraction(factor: float) -> str:
    """Formats a factor for a message: 2, 1/4, 0.8333."""
    for denominator in range(1, 13):
        numerator = round(factor * denominator)
        if numerator and abs(factor * denominator - numerator) < 1e-6 * denominator:
            return str(numerator) if denominator == 1 else f"{numerator}/{denominator}"
    # A factor that differs from 1 is not printed as 1.
    return next(text for digits in (4, 6, 17) if (text := f"{factor:.{digits}g}") != "1")


def common_factor(values: np.ndarray, reference: np.ndarray, tolerance: float) -> float | None:
    """Returns f if `values` is `f * reference`, and None if it is no multiple.

    Args:
        values: any shape.
        reference: the same shape.
        tolerance: maximum error of an element, relative to the largest element.
    """
    values, reference = (v.astype(np.float64).ravel() for v in (values, reference))
    square = reference @ reference
    if not square or values.shape != reference.shape or not np.isfinite(values).all():
        return None
    factor = float(values @ reference / square)
    error = np.abs(values - factor * reference).max(initial=0.0)
    largest = max(np.abs(values).max(initial=0.0), np.abs(reference).max(initial=0.0))
    return factor if error <= 10 * tolerance * largest else None
