"""Compares a curve with the recorded one: bit for bit, or within a tolerance for rounding errors.

A floating-point sum in another order, or by other instructions, has other rounding errors. By backward
error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2002, chapter 3) a computed
matrix product is the exact product of matrices whose elements have small relative errors. How far such
errors move a training run depends on the model, the optimizer and the step, so the recording measures
it: `PERTURBED_RUNS` repetitions compute each step at the weights w (1 +- r), with random signs, and
apply it to w. The size r is 64 units in the last place in float32 and float64, the typical error of a
sum of 4096 products, and one unit in 16 bits, where products are summed in float32. Let R_k be the
largest distance |w' - w| of a tensor between a repetition and the recording up to step k, L_k the
largest difference of the loss, e = 2^-23 (2^-52 in float64), and U_k the sum of the norms of the
tensor's updates. Then after step k a tensor may be at a distance of

    T_k = FACTOR (R_k + e |w_k| + e U_k)

and the loss may differ by FACTOR (L_k + e |loss_k|). The terms with e are for weights that are 0, which
the repetitions do not move. A distance of T_k changes the norm of the tensor by T_k at most, the norm
of its last update by T_k + T_{k-1} at most, and its product with random signs by SIGMAS T_k with a
probability of 6e-7, since the standard deviation of that product is the distance.

FACTOR covers what a few repetitions do not show. docs/testing.md has the largest ratio that was measured
on other replicas, kernels and instruction sets.
"""

from collections.abc import Iterator, Mapping
import dataclasses

import numpy as np

from ctl.errors import UsageError, list_some
from ctl.testing.golden.curve import Curve, Step

FACTOR = 4.0
SIGMAS = 5.0
_INFORMATION = ("ctl",)  # recorded in the environment, but no reason for other bits
_RECORD = "If the change is intended, record the curve again: pytest --update_golden"


@dataclasses.dataclass(frozen=True)
class CurveReport:
    """The comparison of a run with a golden curve.

    Attributes:
        changes: why bits cannot be compared, one line per difference, such as
            "tensorflow: 2.19.0 -> 2.20.0"; empty if bits were compared.
        settings: the options that differ from those of the recording, in the same form.
        step: the first step that differs, from 1; 0 if none does.
        tensor: the first tensor that differs in that step, or "loss"; "" if none does.
        difference: one sentence about the difference.
        notes: what else is known of the difference.
    """

    changes: tuple[str, ...]
    settings: tuple[str, ...]
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
        lines = [f"Step {self.step}: {self.difference}.", f"How: {how}."]
        if self.settings:
            lines.append(f"Settings that changed since the recording: {list_some(self.settings)}.")
        return "\n  ".join([*lines, *self.notes, f"{_RECORD}."])


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
    changes += _changes(recorded.computation, actual.computation)
    if not recorded.repeatable:
        changes.append("two runs of the recording had different bits")
    report = CurveReport(tuple(changes), tuple(_changes(recorded.settings, actual.settings)))
    shapes, expected = list(actual.tensors.values()), list(recorded.tensors.values())
    if shapes != expected:
        name, what = _describe_structure(actual, recorded)
        return dataclasses.replace(report, step=1, tensor=name, difference=what)
    first = (_first_beyond_tolerance if changes else _first_other_bits)(actual, recorded)
    if first is None:
        return report
    step, tensor, difference = first
    notes = tuple(_compare_batches(actual.steps[step - 1], recorded.steps[step - 1]))
    if not changes and not notes:
        notes = (_explain_size(_first_beyond_tolerance(actual, recorded)),)
    versions = [curve.environment.get("ctl", "unknown") for curve in (recorded, actual)]
    if versions[0] != versions[1]:
        notes += (f"The version of ctl has changed: {versions[0]} -> {versions[1]}.",)
    return dataclasses.replace(report, step=step, tensor=tensor, difference=difference, notes=notes)


def tolerances(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tolerances of a golden curve: [steps] of the loss, and [steps, tensors]."""
    epsilon = 2.0 ** (-52 if curve.computation["runtime.precision"] == "float64" else -23)
    steps = curve.steps
    losses = np.array([step.loss or 0.0 for step in steps])
    loss_response = np.maximum.accumulate([step.loss_response for step in steps])
    response = np.maximum.accumulate([step.response for step in steps], axis=0)
    norm = np.array([step.norm for step in steps])
    moved = np.cumsum([step.update for step in steps], axis=0)
    return (
        FACTOR * (loss_response + epsilon * np.abs(losses)),
        FACTOR * (response + epsilon * (norm + moved)),
    )


def _changes(recorded: Mapping[str, str], actual: Mapping[str, str]) -> Iterator[str]:
    for key in dict.fromkeys([*recorded, *actual]):
        if key in _INFORMATION:
            continue
        old, new = recorded.get(key, "not set"), actual.get(key, "not set")
        if old != new:
            yield f"{key}: {_shorten(old)} -> {_shorten(new)}"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _describe_structure(actual: Curve, recorded: Curve) -> tuple[str, str]:
    """Returns the first tensor that has no counterpart of its shape, and a sentence about it."""
    names = list(recorded.tensors.items())
    for i, (name, shape) in enumerate(actual.tensors.items()):
        if i >= len(names) or names[i][1] != shape:
            old = f"{names[i][0]} {names[i][1]}" if i < len(names) else "none"
            return name, f"variable {i + 1} is {name} {shape}, but {old} was recorded"
    name, shape = names[len(actual.tensors)]
    return name, f"{name} {shape} was recorded, but the trainer has no such variable"


def _first_other_bits(actual: Curve, recorded: Curve) -> tuple[int, str, str] | None:
    """Returns the step, the tensor and a sentence about the first difference in any bit."""
    names = list(recorded.tensors)
    for number, (step, expected) in enumerate(zip(actual.steps, recorded.steps, strict=False), 1):
        if not _same_number(step.loss, expected.loss):
            return number, "loss", _describe_loss(step, expected)
        for i, name in enumerate(names):
            if step.bits[i] != expected.bits[i]:
                return number, name, _describe_tensor(name, i, step, expected)
        if step.other_bits != expected.other_bits:
            what = "variables that are not trained"
            return number, what, f"{what}, such as the slots of the optimizer, have other bits"
        if step.batch != expected.batch:
            return number, "batch", "the global batch has other examples, with the same update"
    return None


def _first_beyond_tolerance(actual: Curve, recorded: Curve) -> tuple[int, str, str] | None:
    """Returns the step, the tensor and a sentence about the first difference above the tolerance."""
    loss_tolerance, tolerance = tolerances(recorded)
    before = np.zeros_like(tolerance[0])
    for k, (step, expected) in enumerate(zip(actual.steps, recorded.steps, strict=False)):
        if (step.loss is None) != (expected.loss is None) or (
            step.loss is not None
            and expected.loss is not None
            and _exceeds(step.loss - expected.loss, loss_tolerance[k])
            and not _same_number(step.loss, expected.loss)
        ):
            difference = (
                f"{_describe_loss(step, expected)}; the tolerance is {loss_tolerance[k]:.2g}"
            )
            return k + 1, "loss", difference
        for i, name in enumerate(recorded.tensors):
            bounds = {
                "norm": tolerance[k][i],
                "update": tolerance[k][i] + before[i],
                "projection": SIGMAS * tolerance[k][i],
            }
            for quantity, bound in bounds.items():
                value, old = getattr(step, quantity)[i], getattr(expected, quantity)[i]
                if _exceeds(value - old, bound) and not _same_number(value, old):
                    difference = _describe_tensor(name, i, step, expected, quantity)
                    return k + 1, name, f"{difference}; the tolerance is {bound:.2g}"
        before = tolerance[k]
    return None


def _exceeds(difference: float, bound: float) -> bool:
    return not abs(difference) <= bound  # also if it is NaN


def _same_number(value: float | None, expected: float | None) -> bool:
    return value == expected or (value != value and expected != expected)  # NaN equals NaN


def _describe_loss(step: Step, expected: Step) -> str:
    if step.loss is None or expected.loss is None:
        return f"the loss is {step.loss} instead of {expected.loss}"
    difference = abs(step.loss - expected.loss)
    return (
        f"the loss is {step.loss:.9g} instead of {expected.loss:.9g} (difference {difference:.2g})"
    )


def _describe_tensor(
    name: str, i: int, step: Step, expected: Step, quantity: str | None = None
) -> str:
    """Describes a tensor by a quantity; by default by the one with the largest relative difference."""
    labels = {
        "norm": "norm",
        "update": "norm of the update",
        "projection": "product with fixed signs",
    }

    def relative(label: str) -> float:
        value, old = getattr(step, label)[i], getattr(expected, label)[i]
        return abs(value - old) / max(abs(old), 1e-300)

    chosen = quantity or max(("update", "norm", "projection"), key=relative)
    value, old = getattr(step, chosen)[i], getattr(expected, chosen)[i]
    if value == old:
        return f"{name} has other bits"
    return (
        f"the {labels[chosen]} of {name} is {value:.9g} instead of {old:.9g} "
        f"(difference {abs(value - old):.2g})"
    )


def _compare_batches(step: Step, expected: Step) -> Iterator[str]:
    """Yields a sentence about the global batch of the step, if it differs."""
    if not step.batch or not expected.batch:
        return
    if step.batch.keys() != expected.batch.keys():
        yield (
            f"The batch has the features {', '.join(step.batch)} instead of "
            f"{', '.join(expected.batch)}."
        )
        return
    other = [name for name, bits in step.batch.items() if bits != expected.batch[name]]
    if len(other) == len(step.batch):
        yield "All features of the batch differ: it has other examples, or another order."
    elif other:
        same = [name for name in step.batch if name not in other]
        yield f"In the batch {list_some(other)} differs, but {list_some(same)} does not."


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
