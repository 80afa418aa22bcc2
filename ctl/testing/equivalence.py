"""Tests that the update of a trainer is a function of the global batch alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.testing import splits, trial
from ctl.testing.report import NotComparable, Report
from ctl.testing.trial_spec import TrialSpec
from ctl.trainer import StandardTrainer

Batches = Mapping[str, Any] | Iterable[Mapping[str, Any]]


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
    report = check_replica_equivalence(
        trainer,
        batches,
        replicas=replicas,
        accumulation=accumulation,
        batch_sizes=batch_sizes,
        steps=steps,
        optimizer=optimizer,
        options=options,
        thorough=thorough,
        in_process=in_process,
    )
    if not report.equivalent:
        raise AssertionError(report.failure())
    return report


def check_replica_equivalence(
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
    """Does the same as `assert_replica_equivalent`, but returns the differences in the report."""
    chosen = splits.choose_splits(replicas, accumulation, batch_sizes, thorough=thorough)
    spec = TrialSpec(
        trainer,
        _concatenate(batches, max(split.batch for split in chosen)),
        optimizer,
        options or TrainerOptions(),
        steps,
    )
    if in_process is None:
        in_process = trial.can_run_here(max(replicas))
    return trial.run(spec, chosen) if in_process else trial.run_in_new_process(spec, chosen)


def _concatenate(batches: Batches, required: int) -> dict[str, np.ndarray]:
    """Concatenates all batches; raises UsageError if they have fewer than `required` examples."""
    parts = [batches] if isinstance(batches, Mapping) else list(batches)
    if not parts or not all(isinstance(part, Mapping) and part for part in parts):
        raise UsageError(
            "batches is empty or not a dict of arrays: give a dict of arrays, or a list of them."
        )
    examples = {name: np.concatenate([np.asarray(p[name]) for p in parts]) for name in parts[0]}
    counts = {name: len(values) for name, values in examples.items()}
    if len(set(counts.values())) > 1:
        raise UsageError(
            f"The arrays in batches must have the same number of rows, but have {counts}."
        )
    count = next(iter(counts.values()))
    if count < required:
        raise NotComparable(
            f"The batches have {count} examples in total, but the comparison requires {required} that "
            "differ from each other: give more, or smaller batch_sizes."
        )
    return examples
