"""Proves a trainer right: its update is a function of the global batch alone, or a test fails."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import time
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.options import TrainerOptions
from ctl.testing import causes, diagnosis, extremes, isolation, splits
from ctl.testing.comparison import compare, tolerance_of
from ctl.testing.recording import Name, Plan, Record, build, record
from ctl.testing.report import Report
from ctl.testing.splits import Split
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
        return run(plan, chosen)
    return isolation.run(plan, chosen)


def run(plan: Plan, chosen: Sequence[Split]) -> Report:
    """Compares in this process, which must have as many logical CPUs as a split has replicas."""
    began = time.monotonic()
    comparison = Comparison(plan)
    comparison.add(chosen)
    return comparison.report(began)


class Comparison:
    """Records of splits, and what differs between them.

    comparison = Comparison(plan)
    comparison.add([Split(8, replicas=2)])
    report = comparison.report(time.monotonic())
    """

    def __init__(self, plan: Plan):
        """Takes what to run; nothing is run yet."""
        self._plan = plan
        # Under plain SGD first: there an update tells its gradient.
        self._plain = Plan(plan.make, plan.examples, None, plan.options, plan.steps)
        self._references: dict[int, Record] = {}
        self._refused: dict[Split, str] = {}
        self._names: tuple[Name, ...] = ()
        self._records: dict[Split, Record] = {}
        self.precision = "float64"
        self._tolerance = tolerance_of("float64")

    def add(self, chosen: Sequence[Split]) -> None:
        """Runs splits, each with its reference."""
        for split in chosen:
            if split.batch not in self._references:
                self._references[split.batch] = self._reference(split.reference)
            try:
                trainer = build(self._plain, split, precision=self.precision)
            except UsageError as error:  # ctl computes nothing wrong there
                self._refused[split] = str(error)
                continue
            self._records[split] = record(
                trainer,
                self._plain,
                split,
                evaluate=self._evaluated(split),
                names=self._names,
            )
        if not self._records:
            raise UsageError(f"Every split was refused: {next(iter(self._refused.values()))}")

    def report(self, began: float) -> Report:
        """What differs, and why."""
        differences = [
            difference
            for split, found in self._records.items()
            for difference in compare(
                found, self._references[split.batch], self.precision, self._tolerance
            )
        ]
        cause, notes = "", list[str]()
        if differences:
            found = diagnosis.Evidence(
                self._plain, self.precision, self._records, self._references, differences
            )
            differences, cause = diagnosis.explain(found)
        else:
            differences, cause, notes = extremes.look(self._plain, self.precision)
        if not differences and self._plan.optimizer:
            differences, cause = self._under_own_optimizer()
        return Report(
            trainer=self._plan.name,
            precision=self.precision,
            compared=tuple(self._records),
            refused=self._refused,
            notes=tuple(notes),
            differences=tuple(differences),
            cause=cause,
            seconds=time.monotonic() - began,
        )

    def _evaluated(self, split: Split) -> bool:
        """Evaluations do not accumulate, and their last batch is uneven anyway."""
        return split.micro_batches == 1 and (split.batch == min(self._references) or not split.even)

    def _reference(self, split: Split) -> Record:
        """In float64 if the model can be computed in it; the first reference decides."""
        if self._references:
            return self._checked(split)
        try:
            found = self._checked(split)
        except UsageError:
            raise
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            self.precision = "float32"
            self._tolerance = tolerance_of("float32")
            return self._checked(split)
        if not self._is_double(split):
            self._tolerance = tolerance_of("float32")
        return found

    def _checked(self, split: Split) -> Record:
        trainer = build(self._plain, split, precision=self.precision)
        found = record(trainer, self._plain, split, evaluate=True, names=self._names)
        self._names = found.names
        for step, values in enumerate(found.steps):
            for (kind, name), value in values.items():
                if kind in ("loss", "update") and not np.isfinite(value).all():
                    raise UsageError(
                        f"On one replica the {kind} {name} is not finite at step {step}: give "
                        "batches that the model can be trained on, or compare one step (steps=1)."
                    )
        return found

    def _is_double(self, split: Split) -> bool:
        """Whether outputs and losses are float64: a cast by hand leaves fewer digits."""
        found = diagnosis.first_rows(self._plain, split, self.precision)
        if found is None:
            return True
        floats = [v for v in (*found.outputs, found.losses) if v.dtype.kind == "f"]
        return all(v.dtype == np.float64 for v in floats)

    def _under_own_optimizer(self) -> tuple[list, str]:
        """The same again by the person's optimizer, on the split that shows most."""
        split = max(self._records, key=lambda s: (s.replicas, not s.even, -s.micro_batches))
        pair: list[Record] = []
        for each in (split.reference, split):
            trainer = build(self._plan, each, precision=self.precision)
            pair.append(
                record(
                    trainer, self._plan, each, evaluate=False, names=pair[0].names if pair else ()
                )
            )
        found = compare(pair[1], pair[0], self.precision, self._tolerance)
        return found, causes.OPTIMIZER if found else ""


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
