"""Runs a trainer on several splits and reports what differs between them."""

from collections.abc import Sequence
import time

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.testing import processes
from ctl.testing.comparison import compare, tolerance_of
from ctl.testing.devices import count_logical_cpus, split_cpu
from ctl.testing.diagnosis import causes, numerics, probes, rules
from ctl.testing.recording import Name, Record, record_run
from ctl.testing.report import Difference, Report
from ctl.testing.splits import Split
from ctl.testing.trial_spec import TrialSpec, build_trainer
from ctl.trainer import StandardTrainer

_TIMEOUT = 600.0  # seconds, of a comparison in another process


def can_run_here(devices: int) -> bool:
    """Whether TensorFlow in this process is configured as a comparison requires.

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
    report: Report = processes.call(_split_cpu_and_run, [spec, list(splits)], timeout=_TIMEOUT)[0]
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
        compared=tuple(trial.records),
        refused=trial.refused,
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
        self._plain = TrialSpec(spec.factory, spec.examples, None, spec.options, spec.steps)
        self._names: tuple[Name, ...] = ()
        self._references: dict[int, Record] = {}
        self._trainer: StandardTrainer  # of a reference
        self.records: dict[Split, Record] = {}
        self.refused: dict[Split, str] = {}
        self.precision = "float64"
        self._tolerance = tolerance_of("float64")

    def run(self, splits: Sequence[Split]) -> None:
        """Records each split and its reference."""
        evaluated = _choose_evaluated(splits)
        for split in splits:
            if split.batch not in self._references:
                evaluate = any(s.batch == split.batch for s in evaluated)
                self._references[split.batch] = self._run_reference(split.reference, evaluate)
            try:
                trainer = build_trainer(self._plain, split, precision=self.precision)
            except UsageError as error:  # ctl rejects the split, so it computes nothing wrong there
                self.refused[split] = str(error)
                continue
            self.records[split] = self._record(trainer, split, split in evaluated)
        if not self.records:
            raise UsageError(f"ctl rejects every split: {next(iter(self.refused.values()))}")

    def diagnose(self) -> tuple[list[Difference], str, list[str]]:
        """Returns the differences, the cause of the first one, and notes."""
        differences = [
            difference
            for split, record in self.records.items()
            for difference in compare(
                record, self._references[split.batch], self.precision, self._tolerance
            )
        ]
        if differences:
            evidence = rules.Evidence(
                self._plain, self.precision, self.records, self._references, differences
            )
            return *rules.explain(evidence), []
        differences, cause, notes = numerics.check(self._plain, self._trainer)
        if not differences and self._spec.optimizer:
            differences = self._compare_under_own_optimizer()
            cause = causes.OPTIMIZER if differences else ""
        return differences, cause, notes

    def _run_reference(self, split: Split, evaluate: bool) -> Record:
        """Records a reference; the first one determines the precision."""
        if self._references:
            return self._record_reference(split, evaluate)
        try:
            record = self._record_reference(split, evaluate)
        except UsageError:
            raise
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            # The model has a cast of its own and cannot be computed in float64.
            self.precision = "float32"
            self._tolerance = tolerance_of("float32")
            return self._record_reference(split, evaluate)
        if not probes.computes_in_float64(self._trainer):
            self._tolerance = tolerance_of("float32")
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
                    raise UsageError(
                        f"The {label} is not finite on one replica at step {step}: give batches that "
                        "the model can be trained on, or compare one step (steps=1)."
                    )
        return record

    def _record(self, trainer: StandardTrainer, split: Split, evaluate: bool) -> Record:
        steps = self._spec.steps
        return record_run(trainer, split, steps=steps, evaluate=evaluate, names=self._names)

    def _compare_under_own_optimizer(self) -> list[Difference]:
        """Compares one split again with the user's optimizer, the one most likely to differ."""
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
