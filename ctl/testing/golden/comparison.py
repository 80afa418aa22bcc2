"""Compares a curve with the recorded one: bit for bit, or within its tolerance for rounding errors."""

from collections.abc import Iterator, Mapping
import dataclasses
import itertools

from ctl.errors import UsageError, list_some
from ctl.testing.golden.curve import Curve, Step

_INFORMATION = ("ctl",)  # recorded in the environment, but no reason for other bits
_RECORD = "If the change is intended, record the curve again: pytest --update_golden"
_OTHERS = "variables that are not trained"


@dataclasses.dataclass(frozen=True)
class CurveReport:
    """The comparison of a run with a golden curve.

    Attributes:
        changes: why bits cannot be compared, one line per difference, such as
            "tensorflow: 2.19.0 -> 2.20.0"; empty if bits were compared.
        step: the first step that differs, from 1; 0 if none does.
        tensor: the first tensor that differs in that step, or "loss"; "" if none does.
        difference: one sentence about the difference.
        notes: what else is known of the difference.
    """

    changes: tuple[str, ...]
    step: int = 0
    tensor: str = ""
    difference: str = ""
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all steps agree with the recording."""
        return not self.step

    @property
    def compares_bits(self) -> bool:
        """Whether the curves were compared bit for bit."""
        return not self.changes

    def failure(self) -> str:
        """Returns the error message."""
        how = "the same bits are required, since nothing that determines them has changed"
        if self.changes:
            how = f"compared within the tolerance for rounding errors, since {list_some(self.changes)}"
        first = f"Step {self.step}: {self.difference}."
        return "\n  ".join([first, f"How: {how}.", *self.notes, f"{_RECORD}."])


def compare(actual: Curve, recorded: Curve) -> CurveReport:
    """Compares the steps of a run with a recorded curve.

    Args:
        actual: the run; it may have fewer steps.
        recorded: the golden curve.

    Raises:
        UsageError: the golden curve has fewer steps.
    """
    if len(actual.steps) > len(recorded.steps):
        raise UsageError(
            f"The golden curve has {len(recorded.steps)} steps, but {len(actual.steps)} are required: "
            "record it again by pytest --update_golden."
        )
    changes = list(_changes(recorded.environment, actual.environment))
    if not recorded.repeatable:
        changes.append("two runs of the recording had different bits")
    report = CurveReport(tuple(changes))
    for new, old in itertools.zip_longest(actual.tensors.items(), recorded.tensors.items()):
        if not (new and old and new[1] == old[1]):
            here, there = (" ".join(map(str, each or ["no variable"])) for each in (new, old))
            what = f"the trainer has {here}, where {there} was recorded"
            return dataclasses.replace(report, step=1, tensor=(new or old)[0], difference=what)
    first = _first_difference(actual, recorded, exact=not changes)
    if first is None:
        return report
    step, tensor, difference = first
    notes = list(_compare_batches(actual.steps[step - 1], recorded.steps[step - 1]))
    if not changes and not notes:
        notes.append(_explain_size(_first_difference(actual, recorded, exact=False)))
    before, now = (curve.environment.get("ctl", "unknown") for curve in (recorded, actual))
    if before != now:
        notes.append(f"The version of ctl has changed: {before} -> {now}.")
    return dataclasses.replace(
        report, step=step, tensor=tensor, difference=difference, notes=tuple(notes)
    )


def _changes(recorded: Mapping[str, str], actual: Mapping[str, str]) -> Iterator[str]:
    for key in dict.fromkeys([*recorded, *actual]):
        old, new = recorded.get(key, "not set"), actual.get(key, "not set")
        if old != new and key not in _INFORMATION:
            yield f"{key}: {old:.60} -> {new:.60}"


def _first_difference(
    actual: Curve, recorded: Curve, *, exact: bool
) -> tuple[int, str, str] | None:
    """Returns the step, the tensor and a sentence about the first difference."""
    for number, (step, expected) in enumerate(zip(actual.steps, recorded.steps, strict=False), 1):
        for name, sentence in _differences(step, expected, list(recorded.tensors), exact):
            return number, name, sentence
    return None


def _differences(
    step: Step, expected: Step, names: list[str], exact: bool
) -> Iterator[tuple[str, str]]:
    """Yields each tensor that differs, or "loss", and a sentence about it."""
    tolerances = [expected.loss_tolerance, *(expected.tolerance or [0.0] * len(names))]
    values, olds = [step.loss, *step.update], [expected.loss, *expected.update]
    same_bits = [True, *(a == b for a, b in zip(step.bits, expected.bits, strict=True))]
    for i, name in enumerate(["loss", *names]):
        value, old, label = values[i], olds[i], f"norm of the update of {name}" if i else name
        distance = 0.0 if value == old or (value != value and old != old) else abs(value - old)
        if exact and not distance and not same_bits[i]:
            yield name, f"{name} has other bits"
        elif not distance <= (0.0 if exact else tolerances[i]):  # also if it is NaN
            limit = "" if exact else f"; the tolerance is {tolerances[i]:.2g}"
            change = f"{value:.9g} instead of {old:.9g} (difference {distance:.2g}{limit})"
            yield name, f"the {label} is {change}"
    if exact and step.other_bits != expected.other_bits:
        yield _OTHERS, f"{_OTHERS}, such as the slots of the optimizer, have other bits"
    if exact and step.batch != expected.batch:
        yield "batch", "the global batch has other examples, with the same update"


def _compare_batches(step: Step, expected: Step) -> Iterator[str]:
    """Yields a sentence about the global batch of the step, if it differs."""
    if not step.batch or not expected.batch:
        return
    if step.batch.keys() != expected.batch.keys():
        old, new = ", ".join(expected.batch), ", ".join(step.batch)
        yield f"The batch has the features {new} instead of {old}."
        return
    other = [name for name, bits in step.batch.items() if bits != expected.batch[name]]
    same = [name for name in step.batch if name not in other]
    if other and same:
        yield f"In the batch {list_some(other)} differs, but {list_some(same)} does not."
    elif other:
        yield "All features of the batch differ: it has other examples, or another order."


def _explain_size(beyond: tuple[int, str, str] | None) -> str:
    if beyond is None:
        return (
            "All values are within the tolerance for rounding errors: the same operations were "
            "probably computed in another order."
        )
    step, tensor, _ = beyond
    return (
        f"From step {step} on ({tensor}) the difference exceeds the tolerance for rounding errors."
    )
