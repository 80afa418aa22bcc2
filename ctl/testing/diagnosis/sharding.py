"""Checks that `optimizer.shard_state` changes nothing, with an optimizer that has slots."""

import dataclasses
from typing import Any

import tf_keras

from ctl.testing.comparison import compare
from ctl.testing.diagnosis import causes
from ctl.testing.recording import Record, record_run
from ctl.testing.report import Difference
from ctl.testing.splits import RATE, Split
from ctl.testing.trial_spec import TrialSpec, build_trainer

_STEPS = 3  # wrong slots show from the second step on


def check(
    spec: TrialSpec, split: Split, *, precision: str, tolerance: float
) -> tuple[list[Difference], str]:
    """Compares a split with the same split whose slots are not sharded.

    Args:
        spec: what to run; with SGD and momentum if it names no optimizer.
        split: a split over several replicas.
        precision: dtype of the computation.
        tolerance: maximum error of an element, relative to the largest element.

    Returns:
        The differences and their cause.
    """
    optimizer = spec.optimizer or _make_momentum
    spec = dataclasses.replace(spec, optimizer=optimizer, plain=False, steps=_STEPS)

    def record(names: Any = (), **changes: Any) -> Record:
        trainer = build_trainer(spec, split, precision=precision, **changes)
        return record_run(trainer, split, steps=spec.steps, names=names)

    expected = record(shard_state=False)
    differences = compare(record(expected.names), expected, precision, tolerance)
    if not differences:
        return [], ""
    # The slots of the first step are all alike, so that only the gathered weights can be wrong.
    stale = any(d.kind == "copy" or (d.kind == "update" and d.step == 0) for d in differences)
    return differences, causes.STALE_GATHER if stale else causes.OTHER_SLOTS


def _make_momentum() -> Any:
    return tf_keras.optimizers.SGD(RATE, momentum=0.9)
