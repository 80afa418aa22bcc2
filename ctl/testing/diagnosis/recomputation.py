"""Checks that `ctl.recompute` changes nothing; a mistake in it is the same on every split."""

import dataclasses

from ctl.replica.layers import recompute
from ctl.testing.comparison import compare
from ctl.testing.diagnosis import causes
from ctl.testing.recording import Record, record_run
from ctl.testing.report import Difference
from ctl.testing.trial_spec import TrialSpec, build_trainer


def check(
    spec: TrialSpec, record: Record, *, precision: str, tolerance: float
) -> tuple[list[Difference], str]:
    """Compares a record with a run of the same trainer without recomputation.

    Args:
        spec: what to run.
        record: a record of the trainer.
        precision: dtype of the computation.
        tolerance: maximum error of an element, relative to the largest element.

    Returns:
        The differences and their cause.
    """
    with recompute.disabled():
        trainer = build_trainer(spec, record.split, precision=precision)
        expected = record_run(trainer, record.split, steps=spec.steps, names=record.names)
    record = dataclasses.replace(record, evaluation={})  # an evaluation recomputes nothing
    differences = compare(record, expected, precision, tolerance)
    if not differences:
        return [], ""
    # The moving statistics of the first step do not depend on the gradients.
    moved = any(each.kind == "statistic" for each in differences if each.step == 0)
    return differences, causes.MOVED_TWICE if moved else causes.OTHER_PASS
