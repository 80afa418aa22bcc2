"""Tests that the update of a training loop is a function of the global batch alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.configs.error_location import error_location
from ctl.configs.options import TrainerOptions
from ctl.data.features import map_features
from ctl.data.source import Nest
from ctl.errors import UsageError
from ctl.graphs.unoptimized import without_graph_optimization
from ctl.layers import recompute
from ctl.testing import multiprocess, splits
from ctl.testing.comparison import tolerance_of
from ctl.testing.contents import Names
from ctl.testing.diagnosis import causes, differences, rules
from ctl.testing.diagnosis.evidence import Evidence
from ctl.testing.equivalence_report import NotComparable, Report, ReportError, check_report
from ctl.testing.logical_devices import count_logical_cpus, split_cpu
from ctl.testing.loop_record import LoopRecord
from ctl.testing.splits import Split
from ctl.testing.subjects.base import Calibration, NarrowWeights, SplitRun, Subject
from ctl.testing.subjects.loop import LoopSubject
from ctl.testing.subjects.trainer_subject import TrainerSubject
from ctl.trainer import StandardTrainer

Batches = Mapping[str, Any] | Iterable[Mapping[str, Any]]
_FULL = "the loop takes full batches only (full_batches=True)"
Build = Callable[[tf.distribute.Strategy, int], Any]


def assert_replica_equivalent(
    trainer: Callable[..., StandardTrainer],
    batches: Batches,
    *,
    replicas: Sequence[int] = (1, 2, 4),
    accumulation: Sequence[int] = (1, 2),
    batch_sizes: Sequence[int] | None = None,
    steps: int = 2,
    optimizer: Callable[[], Any] | None = None,
    options: TrainerOptions | None = None,
    thorough: bool = False,
    in_process: bool | None = None,
) -> Report:
    """Asserts that a trainer's update is a function of the global batch alone.

        def test_my_step():
            ctl.testing.assert_replica_equivalent(MyTrainer, {"x": x, "label": label})

    Trains the same global batches on one replica and on several logical CPUs, with even, uneven and
    empty per-replica batches and with micro-batches. Compares the loss, each variable's update
    (under plain SGD a multiple of its gradient), moving statistics, metrics, an evaluation whose
    last batch is a partial one, the variables of every model and optimizer and of the trainer, and the
    replicas' copies of all of them. Computes in float64; in float32, with a larger tolerance, if the
    trainer's code fails in float64.

    Args:
        trainer: the trainer's class, or a function with the arguments of its constructor.
        batches: examples, name -> [examples, ...] array; or a list of such batches. The comparison
            batches the examples itself. They should differ from each other.
        replicas: numbers of replicas to compare.
        accumulation: numbers of micro-batches to compare.
        batch_sizes: global batch sizes; by default some that split evenly, unevenly, and with
            replicas that have no row.
        steps: number of training steps.
        optimizer: makes an optimizer to compare in addition to plain SGD. Optimizers that the trainer
            makes itself are compared as well.
        options: options of the trainer.
        thorough: compare all combinations of replicas, batch sizes and micro-batches.
        in_process: True to compare in this process; False for a new process, which takes a few
            seconds more; None for this process if TensorFlow is configured as required.

    Returns:
        The report of what was compared.

    Raises:
        AssertionError: something differs; the message states the quantity, the split, the factor and
            the likely cause.
        UsageError: nothing can be compared, or ctl rejects the trainer on one replica.
    """
    chosen = splits.choose_splits(replicas, accumulation, batch_sizes, thorough=thorough)
    parts = [batches] if isinstance(batches, Mapping) else list(batches)
    if not all(isinstance(part, Mapping) and part for part in parts):
        raise UsageError(
            "batches is not a dict of arrays: give a dict of arrays, or a list of them."
        )
    arrays = [map_features(lambda _, values: np.asarray(values), part) for part in parts]
    examples = _concatenate(arrays, chosen)
    subject = TrainerSubject(
        trainer, examples, steps, optimizer=optimizer, options=options or TrainerOptions()
    )
    return check_report(run(subject, chosen, in_process=in_process))


def check_replica_equivalence(
    trainer: Callable[..., StandardTrainer], batches: Batches, **arguments: Any
) -> Report:
    """Does the same as `assert_replica_equivalent`, but returns the differences in the report.

    Args:
        trainer: the trainer's class, or a function with the arguments of its constructor.
        batches: examples.
        **arguments: those of `assert_replica_equivalent`.
    """
    return _report(assert_replica_equivalent, trainer, batches, **arguments)


def assert_loop_equivalent(
    build: Build,
    batches: Nest,
    *,
    replicas: Sequence[int] = (1, 2, 4),
    batch_sizes: Sequence[int] | None = None,
    steps: int = 3,
    mask: str = "",
    full_batches: bool = False,
    in_process: bool | None = None,
) -> Report:
    """Asserts that the update of any training loop is a function of the global batch alone.

        def test_my_loop():
            ctl.testing.assert_loop_equivalent(build, {"x": x, "label": label})

    Builds the loop on one replica and on several logical CPUs, gives it the same weights, and trains
    it on the same global batches, with even, uneven and empty per-replica batches, in float64. Compares
    the loss, each variable's update, moving statistics, metrics, all other variables such as slots, and
    the replicas' copies of all of them.

    Args:
        build: `build(strategy, global_batch_size)` returns a `ctl.testing.Loop(step, variables)`, an
            object with `step` and `variables`, an `orbit.StandardTrainer`, or a compiled model of
            tf_keras or Keras 3. It must create its variables in the scope of the strategy.
        batches: examples: an array, or a tuple or dict of arrays, whose rows are the examples; or a
            list of such batches. The examples should differ from each other.
        replicas: numbers of replicas to compare.
        batch_sizes: global batch sizes; by default 8 and 5, which are even, uneven, and leave a
            replica of 4 without rows.
        steps: number of training steps.
        mask: name of a feature to add to a dict of examples. Every replica then gets the same number
            of rows; the feature, [rows], is 1 for rows and 0 for padding, which repeats the last row.
            Without it, replicas get different numbers of rows.
        full_batches: True for a loop that takes full batches only: only even splits are compared.
        in_process: True to compare in this process; False for a new process, which takes a few
            seconds more; None for this process if TensorFlow is configured as required.

    Returns:
        The report of what was compared.

    Raises:
        AssertionError: something differs; the message states the quantity, the split, the factor and
            the likely cause.
        NotComparable: the comparison cannot tell, because the loop draws random numbers, for example.
        UsageError: the arguments are wrong.
    """
    sizes = batch_sizes or splits.default_batch_sizes(max(replicas), 2)
    chosen = splits.choose_splits(replicas, (1,), sizes)
    if full_batches and not any(split.even for split in chosen):
        raise UsageError(
            f"full_batches=True excludes all splits of batch_sizes={tuple(sizes)} on "
            f"{' or '.join(str(count) for count in replicas if count > 1)} replicas: include a batch "
            "size that one of these numbers divides."
        )
    examples = _concatenate(batches if isinstance(batches, list) else [batches], chosen)
    if mask and not isinstance(examples, dict):
        raise UsageError(
            f"mask={mask!r} adds a feature to a dict of examples: give batches as a dict."
        )
    refused = {split: _FULL for split in chosen if full_batches and not split.even}
    compared = [split for split in chosen if split not in refused]
    report = run(LoopSubject(build, examples, steps, mask=mask), compared, in_process=in_process)
    return check_report(dataclasses.replace(report, refused=refused | report.refused))


def check_loop_equivalence(build: Build, batches: Nest, **arguments: Any) -> Report:
    """Does the same as `assert_loop_equivalent`, but returns the differences in the report.

    Args:
        build: makes the loop.
        batches: examples.
        **arguments: those of `assert_loop_equivalent`.
    """
    return _report(assert_loop_equivalent, build, batches, **arguments)


def _report(assert_equivalent: Callable[..., Report], *arguments: Any, **options: Any) -> Report:
    try:
        return assert_equivalent(*arguments, **options)
    except ReportError as error:
        return error.report


def _concatenate(parts: Sequence[Any], chosen: Sequence[splits.Split]) -> Any:
    """Concatenates batches; raises UsageError if there are too few examples for a split."""
    if not tf.nest.flatten(parts):
        raise UsageError("batches is empty: give arrays of examples, or a list of batches.")
    examples = tf.nest.map_structure(lambda *values: np.concatenate(values), *parts)
    counts = {len(values) for values in tf.nest.flatten(examples)}
    required = max(split.batch for split in chosen)
    if len(counts) > 1:
        raise UsageError(
            f"The arrays in batches must have the same number of rows, but have {counts}."
        )
    if min(counts) < required:
        raise NotComparable(
            f"The batches have {min(counts)} examples in total, but the comparison requires {required} "
            "that differ from each other: give more, or smaller batch_sizes."
        )
    return examples


_ONE_TENSOR = "non-DistributedValues"  # of TensorFlow's error for what is the same on all replicas
_DIFFER = "the updates differ; searching for the cause"
_EQUAL = "the updates are equal; checking loss scale and optimizers"
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
    if subject.steps < 1:
        raise UsageError(f"steps is {subject.steps}, but must be at least 1.")
    devices = max(split.replicas for split in splits)
    if in_process or (in_process is None and can_run_here(devices)):
        return _Trial(subject).run(splits)
    report: Report = multiprocess.call(
        *(_split_cpu_and_run, [subject, list(splits), devices]),
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
        self._references: dict[int, LoopRecord] = {}
        self._records: dict[Split, LoopRecord] = {}
        self._refused: dict[Split, str] = {}
        self._rejected: dict[Split, str] = {}  # by a check of the user's code, while it runs
        self._errors: dict[Split, str] = {}
        self._run: SplitRun  # the first one on one replica
        self._calibration: Calibration

    @without_graph_optimization()
    def run(self, splits: Sequence[Split]) -> Report:
        """Compares splits, and finds the cause of a difference."""
        evaluated = _choose_evaluated(splits)
        with recompute.detect_use() as recomputes:
            for split in splits:
                self._record(split, evaluated)
            recomputed = recomputes()
        if not self._records and not self._errors:
            reasons = iter((self._refused | self._rejected).values())
            raise UsageError(f"ctl rejects every split: {next(reasons)}")
        return self._diagnose(recomputed)

    def _record(self, split: Split, evaluated: set[Split]) -> None:
        try:
            if split.batch not in self._references:
                multiprocess.show_progress(f"{self._subject.name} on {split.reference}")
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
        multiprocess.show_progress(f"{self._subject.name} on {split}")
        rejected = self._refused
        try:
            run = self._subject.start(split)
            rejected = self._rejected
            self._records[split] = run.record(self._names, evaluate=split in evaluated)
        except NotComparable:
            raise
        except UsageError as error:
            rejected[split] = str(error).rstrip(".")
            if rejected is self._rejected:  # the difference may show the cause
                self._subject = self._subject.accepting()
                with contextlib.suppress(UsageError):
                    run = self._subject.start(split)
                    self._records[split] = run.record(self._names, evaluate=split in evaluated)
        except Exception as error:  # from the user's code, although it computes the reference
            self._errors[split] = error_location(error)

    @property
    def _names(self) -> tuple[Names, ...]:
        return next(iter(self._references.values())).names

    def _record_reference(self, split: Split, evaluate: bool) -> LoopRecord:
        """Records a reference; the first one in the first precision in which the user's code runs."""
        if self._references:
            record = self._subject.start(split).record(self._names, evaluate=evaluate)
            differences.check_finite(record)
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
        differences.check_finite(record)
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
        differs = bool(differences.compare_splits(evidence))
        is_wide = self._subject.precision == "float64" and not measured.why
        if is_wide and differs and (why := self._subject.find_narrow(self._run)):
            tolerance = max(measured.tolerance, tolerance_of("float32"))
            measured = dataclasses.replace(measured, tolerance=tolerance, why=why)
            evidence = dataclasses.replace(evidence, calibration=measured)
            differs = bool(differences.compare_splits(evidence))
        if measured.undecided and differs:
            finding = rules.explain_random(evidence)
            found, cause = ([finding[0]], finding[1]) if finding else differences.NOTHING
            undecided = "" if finding else measured.undecided
        else:  # splits that are equal also draw the same numbers
            if self._records:
                multiprocess.show_progress(_DIFFER if differs else _EQUAL)
            found, cause = differences.run_checks(evidence)
        # A difference says more than the line of a check.
        rejected = {} if found else self._rejected
        if rejected:
            cause = causes.REJECTED
        elif not found and any(_ONE_TENSOR in error for error in self._errors.values()):
            cause = causes.ONE_TENSOR
        return Report(
            trainer=self._subject.name,
            precision=self._subject.precision,
            why=measured.why,
            compared=tuple(self._records),
            refused=self._refused,
            errors=rejected | self._errors,
            notes=tuple(evidence.notes),
            differences=tuple(found),
            cause=cause,
            undecided=undecided,
        )

    def _describe_precision(self) -> Iterator[str]:
        measured = self._calibration
        if not next(iter(self._references.values())).trains:
            yield differences.EVALUATION
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
