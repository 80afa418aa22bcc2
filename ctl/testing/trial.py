"""Runs a trainer on splits, in this process, and reports what differs between them."""

from collections.abc import Sequence
import time

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.testing.comparison import compare, tolerance_of
from ctl.testing.diagnosis import causes, numerics, rules
from ctl.testing.recording import Name, Plan, Record, build, record
from ctl.testing.report import Report
from ctl.testing.splits import Split


def run(plan: Plan, chosen: Sequence[Split]) -> Report:
    """Compares in this process, which must have as many logical CPUs as a split has replicas."""
    began = time.monotonic()
    trial = Trial(plan)
    trial.add(chosen)
    return trial.report(began)


class Trial:
    """Records of splits, and what differs between them.

    trial = Trial(plan)
    trial.add([Split(8, replicas=2)])
    report = trial.report(time.monotonic())
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
            found = rules.Evidence(
                self._plain, self.precision, self._records, self._references, differences
            )
            differences, cause = rules.explain(found)
        else:
            differences, cause, notes = numerics.look(self._plain, self.precision)
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
        found = rules.first_rows(self._plain, split, self.precision)
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
