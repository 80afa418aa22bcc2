"""Tests that the update of a training loop is a function of the global batch alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.configs.options import TrainerOptions
from ctl.data.features import map_features
from ctl.errors import UsageError
from ctl.testing import splits, trial
from ctl.testing.equivalence_report import (
    DifferenceError,
    NotComparable,
    Report,
    ReportError,
    UndecidedError,
)
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
    return _check(trial.run(subject, chosen, in_process=in_process))


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
    batches: Any,
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
    report = trial.run(
        LoopSubject(build, examples, steps, mask=mask), compared, in_process=in_process
    )
    return _check(dataclasses.replace(report, refused=refused | report.refused))


def check_loop_equivalence(build: Build, batches: Any, **arguments: Any) -> Report:
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


def _check(report: Report) -> Report:
    if report.verdict == "cannot tell":
        raise UndecidedError(report)
    if not report.equivalent:
        raise DifferenceError(report)
    return report


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
