"""ctl.testing.assert_curve: asserts that training computes the values in a golden file."""

from collections.abc import Iterator, Mapping
import dataclasses
import itertools
import os
import pathlib
import pkgutil
from typing import TypeAlias

from ml_collections import config_dict

from ctl.errors import UsageError, list_some, print_line
from ctl.replica.arithmetic import models
from ctl.testing.golden import recording
from ctl.testing.golden.recording import Curve, Step
from ctl.trainer import StandardTrainer

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
    before, now = (each.environment.get("ctl", "unknown") for each in (recorded, actual))
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


UPDATE = "CTL_UPDATE_GOLDEN"  # the variable that the pytest option --update_golden sets

# The curves that this process has recorded, so that two tests of one file do not replace each other's.
_recorded: dict[pathlib.Path, Curve] = {}

Experiment: TypeAlias = str | os.PathLike[str] | config_dict.ConfigDict | StandardTrainer


def assert_curve(
    path: str | os.PathLike[str],
    experiment: Experiment,
    *,
    steps: int = 20,
) -> CurveReport:
    """Asserts that the first steps of training compute the values that a golden file has recorded.

        def test_training_is_unchanged():
            ctl.testing.assert_curve("golden/mnist.json", "experiments/mnist.py", steps=20)

    The golden file has, for each step, the loss, and for each trainable variable and moving statistic
    the norm of its update and a hash. If versions, CPU, devices, strategy and options are as in the
    recording, the bits must be the same. Otherwise a tolerance for rounding errors holds, which was
    measured when the file was recorded; `ctl/testing/golden/recording.py` derives it.

    `pytest --update_golden`, or the environment variable CTL_UPDATE_GOLDEN=1, records the file. It is
    never written otherwise, and a missing file is an error: a test that records what it finds passes
    in a checkout in which the file was forgotten.

    Args:
        path: the golden file; commit it together with the test.
        experiment: a config file, the result of `ctl.config(...)`, or an untrained trainer, which this
            function trains.
        steps: the number of steps; at most as many as in the recording.

    Returns:
        The comparison.

    Raises:
        AssertionError: a step differs; the message names the first one, the first tensor in it, and
            what has changed, and the features of the batch that differ.
        UsageError: there is no such file, it is damaged, the trainer is not a new one, or this process
            has recorded another curve in the same file.
    """
    file = pathlib.Path(path)
    if is_updating():
        _update(file, _record(experiment, steps, measure_tolerance=True))
        return CurveReport(())
    if not file.exists():
        raise UsageError(
            f"{file} does not exist: record it by pytest --update_golden, or with {UPDATE}=1 in the "
            "environment, and commit it."
        )
    recorded = recording.read(file)
    report = compare(_record(experiment, steps, measure_tolerance=False), recorded)
    if not report.equal:
        raise AssertionError(f"{file}: {report.failure()}")
    return report


def is_updating() -> bool:
    """Returns whether `assert_curve` records golden files instead of comparing with them."""
    return os.environ.get(UPDATE, "0") not in ("", "0")


def _update(file: pathlib.Path, recorded: Curve) -> None:
    if not _agree(recorded, _recorded.setdefault(file.resolve(), recorded)):
        raise UsageError(
            f"{file} was recorded already, by another test of this run with another curve: give each "
            "of them its own file, or skip the test that only compares when golden files are recorded."
        )
    try:
        old = recording.read(file) if file.exists() else None
    except UsageError:
        old = None  # a damaged file, or one of another format, is recorded again
    if old and old.repeatable and _agree(recorded, old):
        print_line(f"{file} is unchanged.")
        return
    recording.write(file, recorded)
    last = recorded.steps[-1]
    repeatable = "" if recorded.repeatable else "; two runs had different bits"
    print_line(
        f"{file}: recorded {len(recorded.steps)} steps of {len(recorded.tensors)} tensors; last loss "
        f"{last.loss:.5g} +- {last.loss_tolerance:.1g} on other machines{repeatable}"
    )


def _agree(new: Curve, old: Curve) -> bool:
    same = len(new.steps) == len(old.steps) and new.environment == old.environment
    return same and compare(new, old).equal


def _record(experiment: Experiment, steps: int, *, measure_tolerance: bool) -> Curve:
    if isinstance(experiment, StandardTrainer):
        return recording.record(experiment, steps, measure_tolerance=measure_tolerance)
    # Keras numbers the layers of a process, and options name variables by pattern.
    models.reset_names()
    run_class = pkgutil.resolve_name("ctl:Run")  # by name: it is above this layer
    with run_class(experiment, print_lines=False) as run:
        return recording.record(run.trainer, steps, measure_tolerance=measure_tolerance)
