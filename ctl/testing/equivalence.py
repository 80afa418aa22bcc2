"""Proves a trainer right: its update is a function of the global batch alone, or a test fails."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.testing import isolation, splits, trial
from ctl.testing.recording import Plan
from ctl.testing.report import Report
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
    """Fails unless a trainer's step is a function of the global batch alone.

        def test_my_step():
            ctl.testing.assert_replica_equivalent(MyTrainer, {"x": x, "label": label})

    It trains the same global batches on one replica and on several logical CPUs, with even, uneven
    and empty shares and with micro-batches, and compares the loss, each variable's update (under
    plain SGD a multiple of its gradient), moving statistics, metrics, an evaluation whose last
    batch is a partial one, the optimizer's and the trainer's own variables, and the replicas'
    copies of all of them. It computes in float64, else in float32 with a tolerance to suit.

    Args:
        trainer: the class, or a function that makes one from the arguments of its constructor.
        batches: examples, name -> [examples, ...] array; or batches of them. What is batched,
            and how, the comparison decides. They should differ from each other.
        replicas: how many to compare.
        accumulation: micro-batches to compare.
        batch_sizes: rows of a global batch; by default even, uneven and empty shares are made.
        steps: how many to train.
        optimizer: makes an optimizer that is compared beside plain SGD.
        options: the trainer's.
        thorough: take all combinations of replicas, batch sizes and micro-batches.
        in_process: False for a process of its own, which takes a few seconds; True for this one;
            None for this one if TensorFlow is as the comparison needs it.

    Returns:
        What was compared.

    Raises:
        AssertionError: what differs, on which split, by what factor, and the likely cause.
        UsageError: nothing can be compared.
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
    """As `assert_replica_equivalent`, but returns what differs."""
    chosen = splits.chosen(replicas, accumulation, batch_sizes, thorough=thorough)
    plan = Plan(
        trainer,
        _examples(batches, max(split.batch for split in chosen)),
        optimizer,
        options or TrainerOptions(),
        steps,
    )
    if in_process is None:
        in_process = isolation.is_ready(max(replicas))
    if in_process:
        return trial.run(plan, chosen)
    return isolation.run(plan, chosen)


def _examples(batches: Batches, least: int) -> dict[str, np.ndarray]:
    """The examples of all batches, one after the other."""
    parts = [batches] if isinstance(batches, Mapping) else list(batches)
    if not parts or not all(isinstance(part, Mapping) and part for part in parts):
        raise UsageError("batches is empty or no dict: give a dict of arrays, or a list of them.")
    names = list(parts[0])
    joined = {name: np.concatenate([np.asarray(p[name]) for p in parts]) for name in names}
    counts = {name: len(values) for name, values in joined.items()}
    if len(set(counts.values())) > 1:
        raise UsageError(f"The batches have {counts} rows: want the same number in each array.")
    count = next(iter(counts.values()))
    if count < least:
        raise UsageError(
            f"The batches have {count} examples together, and the comparison wants {least} that "
            "differ from each other: give more, or smaller batch_sizes."
        )
    return joined
