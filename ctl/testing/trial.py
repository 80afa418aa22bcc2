"""Runs a trainer on several splits and reports what differs between them."""

from collections.abc import Sequence
import dataclasses
import time

import numpy as np
import tensorflow as tf

from ctl.configs.error_location import error_location
from ctl.errors import UsageError
from ctl.replica.layers import recompute
from ctl.testing import processes
from ctl.testing.comparison import compare, tolerance_of
from ctl.testing.devices import count_logical_cpus, split_cpu
from ctl.testing.diagnosis import causes, numerics, probes, recomputation, rules, sharding
from ctl.testing.diagnosis.evidence import Evidence
from ctl.testing.recording import Names, Record, list_optimizers, record_run
from ctl.testing.report import Difference, NotComparable, Report
from ctl.testing.splits import Split
from ctl.testing.trial_spec import TrialSpec, build_trainer
from ctl.trainer import StandardTrainer

_TIMEOUT = 600.0  # seconds for a comparison in another process
# Tried in this order: the precision, and whether examples in float32 are cast to it. Without
# the cast, the difference of float64 outputs and float32 targets is an error.
_ATTEMPTS = (("float64", True), ("float64", False), ("float32", False))

# Each element of Adam's first update is about its gradient divided by the size of the gradient.
_OPTIMIZER_NOT_COMPARED = (
    "The optimizer was not compared: it may amplify the rounding errors of float32."
)


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


def run_in_new_process(spec: TrialSpec, splits: Sequence[Split]) -> Report:
    """Compares splits in a new process, where TensorFlow has its default configuration.

    Args:
        spec: what to run; it must be picklable.
        splits: the splits to compare.

    Raises:
        UsageError: the trainer cannot be pickled, or nothing can be compared.
        AssertionError: the process failed; the message has its output.
    """
    devices = max(split.replicas for split in splits)
    report: Report = processes.call(
        *(_split_cpu_and_run, [spec, list(splits)]),
        timeout=_TIMEOUT,
        alternative=processes.IN_THIS_PROCESS.format(devices=devices),
    )[0]
    return report


def _split_cpu_and_run(spec: TrialSpec, splits: Sequence[Split]) -> Report:
    split_cpu(max(split.replicas for split in splits))
    return run(spec, splits)


def run(spec: TrialSpec, splits: Sequence[Split]) -> Report:
    """Compares splits in this process, which needs a logical CPU for each replica.

    Args:
        spec: what to run.
        splits: the splits to compare.

    Raises:
        UsageError: nothing can be compared.
    """
    start = time.monotonic()
    trial = _Trial(spec)
    trial.run(splits)
    differences, cause, notes = trial.diagnose()
    return Report(
        trainer=spec.trainer_name,
        precision=trial.precision,
        why=trial.why,
        compared=tuple(trial.records),
        refused=trial.refused,
        errors=trial.errors,
        notes=tuple(notes),
        differences=tuple(differences),
        cause=cause,
        seconds=time.monotonic() - start,
    )


class _Trial:
    """The records of all splits and of their references."""

    def __init__(self, spec: TrialSpec):
        self._spec = spec
        # Under plain SGD first, where an update is a multiple of the gradient.
        self._plain = dataclasses.replace(spec, plain=True)
        self._names: tuple[Names, ...] = ()
        self._references: dict[int, Record] = {}
        self._trainer: StandardTrainer  # the trainer of a reference
        self._recomputes = False
        self.records: dict[Split, Record] = {}
        self.refused: dict[Split, str] = {}
        self.errors: dict[Split, str] = {}
        self.precision = "float64"
        self.why = ""  # why the tolerance is not the one for float64
        self._tolerance = tolerance_of("float64")

    def run(self, splits: Sequence[Split]) -> None:
        """Records each split and its reference."""
        with recompute.detect_use() as recomputes:
            self._run(splits)
            self._recomputes = recomputes()

    def _run(self, splits: Sequence[Split]) -> None:
        evaluated = _choose_evaluated(splits)
        for split in splits:
            if split.batch not in self._references:
                evaluate = any(s.batch == split.batch for s in evaluated)
                try:
                    reference = self._run_reference(split.reference, evaluate)
                except Exception as error:
                    # A loss over several rows, such as a triplet loss, has no value for a single row.
                    if split.batch > 1 or not self._references:
                        raise
                    place = error_location(error)
                    self.refused[split] = f"a batch of one row fails on one replica too: {place}"
                    continue
                self._references[split.batch] = reference
            try:
                trainer = build_trainer(self._plain, split, precision=self.precision)
                self.records[split] = self._record(trainer, split, split in evaluated)
            except UsageError as error:  # ctl rejects the split, so it computes nothing wrong there
                self.refused[split] = str(error)
            except Exception as error:  # from the user's code, although it computes the reference
                self.errors[split] = error_location(error)
        if not self.records and not self.errors:
            raise UsageError(f"ctl rejects every split: {next(iter(self.refused.values()))}")

    def diagnose(self) -> tuple[list[Difference], str, list[str]]:
        """Returns the differences, the cause of the first one, and notes."""
        several = [split for split in self.records if split.replicas > 1]
        if self._spec.options.shard_state and several:
            # First, because the same mistake has many effects in the comparison with one replica.
            differences, cause = sharding.check(
                self._spec, several[0], precision=self.precision, tolerance=self._tolerance
            )
            if differences:
                return differences, cause, []
        differences = [
            difference
            for split, record in self.records.items()
            for difference in compare(
                record, self._references[split.batch], self.precision, self._tolerance
            )
        ]
        if differences:
            evidence = Evidence(
                self.records, self._references, differences, self._plain, self.precision
            )
            return *rules.explain(evidence), []
        differences, cause, notes = numerics.check(self._plain, self._trainer)
        if not differences and self._recomputes:
            reference = next(iter(self._references.values()))
            differences, cause = recomputation.check(
                self._plain, reference, precision=self.precision, tolerance=self._tolerance
            )
        own_optimizer = self._spec.optimizer or len(list_optimizers(self._trainer)) > 1
        if not differences and own_optimizer and self.records:
            if self.why:
                return differences, cause, [*notes, _OPTIMIZER_NOT_COMPARED]
            differences = self._compare_under_own_optimizers()
            cause = causes.OPTIMIZER if differences else ""
        return differences, cause, notes

    def _run_reference(self, split: Split, evaluate: bool) -> Record:
        """Records a reference; the first one determines the precision."""
        if self._references:
            return self._record_reference(split, evaluate)
        given = self._plain
        for precision, casts in _ATTEMPTS:
            self.precision, self._tolerance = precision, tolerance_of(precision)
            self._plain = given.cast_examples(precision) if casts else given
            try:
                record = self._record_reference(split, evaluate)
                break
            except Exception as error:
                # The code may have a cast of its own, or an operation without a float64 kernel.
                if precision == "float32":
                    raise
                self.why = f"float64 fails with {error_location(error)}"
        if precision == "float64":
            narrow = probes.find_narrow(self._trainer)
            self._tolerance = tolerance_of("float32" if narrow else "float64")
            self.why = narrow and f"computed in float64, but {narrow}"
        self._spec = dataclasses.replace(self._spec, examples=self._plain.examples)
        return record

    def _record_reference(self, split: Split, evaluate: bool) -> Record:
        trainer = build_trainer(self._plain, split, precision=self.precision)
        record = self._record(trainer, split, evaluate)
        self._names = record.names
        self._trainer = trainer
        for step, values in enumerate(record.steps):
            for (kind, name), value in values.items():
                if kind in ("loss", "update") and not np.isfinite(value).all():
                    label = name if kind == "loss" else f"{kind} of {name}"
                    raise NotComparable(
                        f"The {label} is not finite on one replica at step {step}: give batches that "
                        "the model can be trained on, or compare one step (steps=1)."
                    )
        return record

    def _record(self, trainer: StandardTrainer, split: Split, evaluate: bool) -> Record:
        steps = self._spec.steps
        return record_run(trainer, split, steps=steps, evaluate=evaluate, names=self._names)

    def _compare_under_own_optimizers(self) -> list[Difference]:
        """Repeats the comparison of the split most likely to differ, with the user's optimizers."""
        split = max(self.records, key=lambda s: (s.replicas, not s.even, -s.micro_batches))
        records: list[Record] = []
        for each in (split.reference, split):
            trainer = build_trainer(self._spec, each, precision=self.precision)
            names = records[0].names if records else ()
            records.append(record_run(trainer, each, steps=self._spec.steps, names=names))
        return compare(records[1], records[0], self.precision, self._tolerance)


def _choose_evaluated(splits: Sequence[Split]) -> set[Split]:
    """Chooses one split per number of replicas, uneven if there is one.

    Evaluations do not accumulate, and the last batch of each is uneven in any case.
    """
    plain = [split for split in splits if split.micro_batches == 1]
    return {
        min((s for s in plain if s.replicas == replicas), key=lambda s: s.even)
        for replicas in {split.replicas for split in plain}
    }
