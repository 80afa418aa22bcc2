"""Finds mistakes of loops that draw random numbers, whose values cannot be compared."""

import dataclasses
import functools

import numpy as np

from ctl.testing.diagnosis import probes
from ctl.testing.loops import causes
from ctl.testing.loops.calibration import relative_distance
from ctl.testing.loops.diagnosis import LoopEvidence
from ctl.testing.loops.protocol import LoopSplit
from ctl.testing.loops.runner import LoopRun
from ctl.testing.recording import Record
from ctl.testing.report import Difference

_CLOSE = 1e-4  # relative
_ROUNDING = 0.1  # relative; larger than the rounding errors of a loop that computes in 16 bits


def explain_random(evidence: LoopEvidence, *, random: bool) -> tuple[list[Difference], str]:
    """Recognizes mistakes in spite of random numbers: equal draws, and draws in an evaluation.

    Args:
        evidence: the evidence of the loop.
        random: False if only another order of the rows changes the result, so that rounding errors
            must be distinguished from random numbers with a fixed seed.
    """
    reference = evidence.run.record(evidence.state)
    updates = [v for step in reference.steps for (k, _), v in step.items() if k == "update"]
    split = LoopSplit(2 * (evidence.run.split.batch // 2), 2)
    if not any(update.any() for update in updates):
        order = np.arange(evidence.run.split.batch)[::-1]
        other = evidence.run.record(evidence.state, reference.names, order=order).steps[0]
        distances = {
            key: float(np.abs(other[key] - value).max(initial=0.0))
            for key, value in reference.steps[0].items()
            if key[0] in ("loss", "metric")
        }
        changed = [key for key, distance in distances.items() if distance]
        if not changed:
            return [], ""
        kind, name = changed[0]
        difference = Difference(kind, name, split, 0, None, distances[kind, name])
        return [difference], causes.EVALUATION_NOISE
    threshold = _CLOSE if random else _ROUNDING
    if probes.attempt(functools.partial(_draws_same_numbers, evidence, split, threshold)):
        first = next(name for kind, name in reference.steps[0] if kind == "update")
        distance = float(max(np.abs(update).max() for update in updates))
        return [Difference("update", first, split, 0, None, distance)], causes.SAME_NUMBERS
    return [], ""


def _draws_same_numbers(evidence: LoopEvidence, split: LoopSplit, threshold: float) -> bool:
    """Returns whether two replicas with the same rows compute the same as one of them.

    The rows are all equal, so that only random numbers can make them different.
    """
    spec = dataclasses.replace(evidence.spec, steps=1)
    spec = dataclasses.replace(spec, examples=spec.rows([0] * split.batch))
    half, both, several = (
        LoopRun(spec, each).record(evidence.state)
        for each in (LoopSplit(split.batch // 2), LoopSplit(split.batch), split)
    )
    several = _rename(several, half)
    return (
        relative_distance(several, half) < _CLOSE
        and relative_distance(_rename(both, half), half) > threshold
    )


def _rename(record: Record, names: Record) -> Record:
    steps = [
        dict(zip(expected, values.values(), strict=True))
        for values, expected in zip(record.steps, names.steps, strict=True)
    ]
    return dataclasses.replace(record, steps=steps)
