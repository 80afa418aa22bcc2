"""Runs a loop on several splits and reports what differs between them."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from ctl.configs.error_location import error_location
from ctl.errors import UsageError
from ctl.testing.comparison import compare
from ctl.testing.loops import calibration, diagnosis, randomness
from ctl.testing.loops.protocol import LoopSplit
from ctl.testing.loops.runner import LoopRun, LoopSpec, State
from ctl.testing.recording import Record
from ctl.testing.report import Difference, NotComparable, Report
from ctl.testing.splits import Split

_EVALUATION = "No trainable variable changed: compared as an evaluation."


class LoopTrial:
    """The records of all splits and of their references."""

    def __init__(self, spec: LoopSpec):
        self._spec = spec
        self._references: dict[int, Record] = {}
        self._records: dict[Split, Record] = {}
        self._errors: dict[Split, str] = {}
        self._notes: list[str] = []

    def run(self, chosen: Sequence[LoopSplit]) -> Report:
        """Compares splits, and finds the cause of a difference."""
        reference_run, state = self._run_first_reference(chosen[0])
        first = self._references[chosen[0].batch]
        measured = calibration.calibrate(self._spec, reference_run, state, first)
        if not _has_updates(first):
            self._notes.append(_EVALUATION)
        if not measured.undecided and measured.noise > measured.tolerance / 100:
            self._notes.append(
                f"Differences below {measured.tolerance:.2g} of a value cannot be distinguished from "
                "rounding errors: another order of the rows on one replica changes it by "
                f"{measured.noise:.2g}."
            )
        for split in chosen:
            self._record(split, state)
        report = Report(
            trainer="",
            precision=self._spec.precision,
            compared=tuple(self._records),
            refused={},
            errors=dict(self._errors),
            notes=tuple(self._notes),
        )
        if measured.undecided:
            return self._report_undecided(report, reference_run, state, measured)
        differences, cause = self._diagnose(reference_run, state, measured.tolerance)
        notes = tuple(self._notes)
        return dataclasses.replace(report, differences=tuple(differences), cause=cause, notes=notes)

    def _run_first_reference(self, split: LoopSplit) -> tuple[LoopRun, State]:
        """Builds the first reference, which determines the precision, and its state."""
        try:
            run = LoopRun(self._spec, _reference(split))
            if run.precision == "float32":
                # `build` may have imported the version of Keras whose default dtype was not set.
                run = LoopRun(self._spec, _reference(split))
            reason = "its weights are float32"
        except UsageError:
            raise
        except Exception as error:
            run, reason = None, f"float64 fails with {error_location(error)}"
        if run is None or run.precision == "float32":
            self._spec = dataclasses.replace(self._spec, precision="float32")
            self._notes.append(f"Computed in float32: {reason}.")
            run = LoopRun(self._spec, _reference(split))
        state = run.state()
        self._references[split.batch] = record = run.record(state)
        _check_finite(record)
        return run, state

    def _record(self, split: LoopSplit, state: State) -> None:
        names = next(iter(self._references.values())).names
        if split.batch not in self._references:
            reference = LoopRun(self._spec, _reference(split))
            self._references[split.batch] = record = reference.record(state, names)
            _check_finite(record)
        try:
            self._records[split] = LoopRun(self._spec, split).record(state, names)
        except UsageError:
            raise
        except Exception as error:  # from the user's code, although it computes the reference
            self._errors[split] = error_location(error)

    def _differences(self, tolerance: float) -> list[Difference]:
        precision = self._spec.precision
        return [
            difference
            for split, record in self._records.items()
            for difference in compare(
                record, _drop_metric_variables(self._references[split.batch]), precision, tolerance
            )
        ]

    def _diagnose(
        self, run: LoopRun, state: State, tolerance: float
    ) -> tuple[list[Difference], str]:
        differences = self._differences(tolerance)
        evidence = diagnosis.LoopEvidence(
            self._records, self._references, differences, self._spec, run, state
        )
        # First, because updates that are not divided by the scale are too large to be compared.
        scaled, cause = diagnosis.check_loss_scale(evidence, tolerance)
        if scaled:
            return scaled, cause
        if differences:
            return diagnosis.explain(evidence)
        differences, cause = diagnosis.check_normalization(evidence)
        if not differences and self._records and run.contents.optimizers:
            return self._compare_own_optimizers(tolerance)
        return differences, cause

    def _compare_own_optimizers(self, tolerance: float) -> tuple[list[Difference], str]:
        """Compares one split again with the loop's own update rule."""
        if self._spec.precision != "float64":
            self._notes.append("The optimizer was not compared: it may amplify rounding errors.")
            return [], ""
        spec = dataclasses.replace(self._spec, plain=False)
        split = max(self._records, key=lambda s: (s.replicas, not s.even))
        run = LoopRun(spec, _reference(split))
        state = run.state()
        plain = self._references[split.batch]
        reference = run.record(state, plain.names)
        _check_finite(reference)
        if _has_updates(plain) and not _has_updates(reference):
            self._notes.append(f"With the loop's own optimizer: n{_EVALUATION[1:]}")
        noise = calibration.measure_noise(run, state, reference)
        tolerance = max(tolerance, calibration.MARGIN * noise)
        record = LoopRun(spec, split).record(state, plain.names)
        zero = calibration.find_zero_updates(plain)
        differences = [
            difference
            for difference in compare(
                record, _drop_metric_variables(reference), spec.precision, tolerance
            )
            if difference.name not in zero
        ]
        return differences, diagnosis.causes.OPTIMIZER if differences else ""

    def _report_undecided(
        self, report: Report, run: LoopRun, state: State, measured: calibration.Calibration
    ) -> Report:
        """Reports what is certain although the values of the steps cannot be compared."""
        evidence = diagnosis.LoopEvidence(
            self._records, self._references, (), self._spec, run, state
        )
        if not measured.narrow:
            differences, cause = randomness.explain_random(evidence, random=measured.random)
            if differences:
                return dataclasses.replace(report, differences=tuple(differences), cause=cause)
        return dataclasses.replace(report, undecided=measured.undecided)


def _reference(split: Split) -> LoopSplit:
    return LoopSplit(split.batch)


def _drop_metric_variables(record: Record) -> Record:
    """Returns a record without the variables of metrics, of which only the results matter.

    If each replica updates a mean with its own mean, the result may be right, but its count is not 1.
    """
    variables = {name for name in record.names[-1] if name[0] == "metric"}
    steps = [{n: v for n, v in values.items() if n not in variables} for values in record.steps]
    return dataclasses.replace(record, steps=steps)


def _has_updates(record: Record) -> bool:
    """Returns whether a step changed a trainable variable."""
    return any(
        value.any() for step in record.steps for (k, _), value in step.items() if k == "update"
    )


def _check_finite(record: Record) -> None:
    for step, values in enumerate(record.steps):
        for (kind, name), value in values.items():
            if kind in ("loss", "update") and not np.isfinite(value).all():
                raise NotComparable(
                    f"The {kind} {name} is not finite on {record.split} at step {step}: give batches "
                    "that the model can be trained on, or compare one step (steps=1)."
                )
