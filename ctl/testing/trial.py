"""Runs a loop on several splits and reports what differs between them."""

from collections.abc import Iterator, Sequence
import dataclasses
import os

import tensorflow as tf

from ctl.configs.error_location import error_location
from ctl.errors import UsageError
from ctl.replica.layers import recompute
from ctl.testing import multiprocess
from ctl.testing.contents import Names
from ctl.testing.diagnosis import calibration
from ctl.testing.diagnosis.differences import EVALUATION, NOTHING, check_finite, run_checks
from ctl.testing.diagnosis.evidence import Evidence
from ctl.testing.equivalence_report import NotComparable, Report
from ctl.testing.logical_devices import count_logical_cpus, split_cpu
from ctl.testing.loop_record import Record
from ctl.testing.splits import Split
from ctl.testing.subjects.base import Calibration, NarrowWeights, SplitRun, Subject

_TIMEOUT = 600.0  # seconds for a comparison in another process


def run(subject: Subject, splits: Sequence[Split], *, in_process: bool | None = True) -> Report:
    """Compares splits.

    Args:
        subject: what to run; it must be picklable for another process.
        splits: the splits to compare.
        in_process: True for this process, which needs a logical CPU for each replica; False for a new
            one, where TensorFlow has its default configuration; None for this one if it can.

    Raises:
        UsageError: the subject cannot be pickled, or nothing can be compared.
        AssertionError: the process failed; the message has its output.
    """
    devices = max(split.replicas for split in splits)
    if in_process or (in_process is None and can_run_here(devices)):
        return _Trial(subject).run(splits)
    variables = {k: v for k in ("TF_USE_LEGACY_KERAS",) if (v := os.environ.get(k)) is not None}
    report: Report = multiprocess.call(
        *(_split_cpu_and_run, [subject, list(splits), devices], [variables]),
        timeout=_TIMEOUT,
        alternative=multiprocess.IN_THIS_PROCESS.format(devices=devices),
    )[0]
    return report


def can_run_here(devices: int) -> bool:
    """Returns whether TensorFlow in this process is configured as a comparison requires.

    This does not initialize TensorFlow's devices.

    Args:
        devices: required number of logical CPUs.
    """
    return (
        count_logical_cpus() >= devices
        and tf.executing_eagerly()
        and not tf.config.functions_run_eagerly()
        and not tf.distribute.has_strategy()
        and tf.config.get_soft_device_placement()
        and not tf.config.optimizer.get_jit()
    )


def _split_cpu_and_run(subject: Subject, splits: Sequence[Split], devices: int) -> Report:
    split_cpu(devices)
    return _Trial(subject).run(splits)


class _Trial:
    """The records of all splits and of their references."""

    def __init__(self, subject: Subject):
        self._subject = subject
        self._references: dict[int, Record] = {}
        self._records: dict[Split, Record] = {}
        self._refused: dict[Split, str] = {}
        self._errors: dict[Split, str] = {}
        self._run: SplitRun  # the first one on one replica
        self._calibration: Calibration

    def run(self, splits: Sequence[Split]) -> Report:
        """Compares splits, and finds the cause of a difference."""
        evaluated = _choose_evaluated(splits)
        with recompute.detect_use() as recomputes:
            for split in splits:
                self._record(split, evaluated)
            recomputed = recomputes()
        if not self._records and not self._errors:
            raise UsageError(f"ctl rejects every split: {next(iter(self._refused.values()))}")
        return self._diagnose(recomputed)

    def _record(self, split: Split, evaluated: set[Split]) -> None:
        try:
            if split.batch not in self._references:
                evaluate = any(each.batch == split.batch for each in evaluated)
                self._references[split.batch] = self._record_reference(split.reference, evaluate)
        except NotComparable:
            raise
        except Exception as error:
            # A loss over several rows, such as a triplet loss, has no value for a single row.
            if split.batch > 1 or not self._references:
                raise
            place = error_location(error)
            self._refused[split] = f"a batch of one row fails on one replica too: {place}"
            return
        try:
            run = self._subject.start(split)
            self._records[split] = run.record(self._names, evaluate=split in evaluated)
        except NotComparable:
            raise
        except UsageError as error:  # ctl rejects the split, so it computes nothing wrong there
            self._refused[split] = str(error)
        except Exception as error:  # from the user's code, although it computes the reference
            self._errors[split] = error_location(error)

    @property
    def _names(self) -> tuple[Names, ...]:
        return next(iter(self._references.values())).names

    def _record_reference(self, split: Split, evaluate: bool) -> Record:
        """Records a reference; the first one in the first precision in which the user's code runs."""
        if self._references:
            record = self._subject.start(split).record(self._names, evaluate=evaluate)
            check_finite(record)
            return record
        given, why = self._subject, ""
        for precision, examples in given.attempts:
            self._subject = given.cast(precision, examples=examples)
            try:
                self._run = self._subject.start(split)
                record = self._run.record(evaluate=evaluate)
                break
            except NarrowWeights as error:
                why = str(error)
            except Exception as error:
                # The code may have a cast of its own, or an operation without a float64 kernel.
                if (precision, examples) == given.attempts[-1]:
                    raise
                why = f"float64 fails with {error_location(error)}"
        check_finite(record)
        self._subject = self._subject.with_state_of(self._run)
        measured = self._subject.calibrate(self._run, record)
        why = measured.why or (why if self._subject.precision == "float32" else "")
        self._calibration = dataclasses.replace(measured, why=why)
        return record

    def _diagnose(self, recomputes: bool) -> Report:
        measured, undecided = self._calibration, ""
        evidence = Evidence(
            *(self._subject, self._run, measured, self._records, self._references),
            recomputes=recomputes,
            notes=list(self._describe_precision()),
        )
        if measured.undecided:
            finding = calibration.explain_random(evidence)
            differences, cause = ([finding[0]], finding[1]) if finding else NOTHING
            undecided = "" if finding else measured.undecided
        else:
            differences, cause = run_checks(evidence)
        return Report(
            trainer=self._subject.name,
            precision=self._subject.precision,
            why=measured.why,
            compared=tuple(self._records),
            refused=self._refused,
            errors=self._errors,
            notes=tuple(evidence.notes),
            differences=tuple(differences),
            cause=cause,
            undecided=undecided,
        )

    def _describe_precision(self) -> Iterator[str]:
        measured = self._calibration
        if not next(iter(self._references.values())).trains:
            yield EVALUATION
        if not measured.undecided and measured.noise > measured.tolerance / 100:
            yield (
                f"Differences below {measured.tolerance:.2g} of a value cannot be distinguished from "
                "rounding errors: another order of the rows on one replica changes it by "
                f"{measured.noise:.2g}."
            )


def _choose_evaluated(splits: Sequence[Split]) -> set[Split]:
    """Chooses one split per number of replicas, uneven if there is one.

    Evaluations do not accumulate, and the last batch of each is uneven in any case.
    """
    plain = [split for split in splits if split.micro_batches == 1]
    return {
        min((s for s in plain if s.replicas == replicas), key=lambda s: s.even)
        for replicas in {split.replicas for split in plain}
    }
