"""Measures the rounding errors and the randomness of a loop on one replica."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ctl.testing.comparison import tolerance_of
from ctl.testing.diagnosis import causes
from ctl.testing.diagnosis.evidence import Evidence, Finding, attempt
from ctl.testing.equivalence_report import Difference
from ctl.testing.loop_record import Record
from ctl.testing.splits import Split
from ctl.testing.subjects.base import Calibration

if TYPE_CHECKING:
    from ctl.testing.subjects.loop import LoopRun

MARGIN = 8.0  # on several replicas, more sums have another order than on one
_SMALL = 1e-3  # relative to the largest value: smaller ones consist of rounding errors
_NARROW = ("bfloat16", "float16")
_LARGE = 1e-2  # relative; no rounding error of a few steps in float32
_CLOSE = 1e-4  # relative; of two runs that draw the same numbers
_ROUNDING = 0.1  # relative; larger than the rounding errors of a loop that computes in 16 bits


def calibrate(run: "LoopRun", record: Record) -> Calibration:
    """Runs a loop on one replica with the rows of each batch in another order.

    The order must not matter, so that every difference is a rounding error, in the precision that the
    loop computes in, or shows that no comparison is possible.

    Args:
        run: the loop on one replica.
        record: what it computes.
    """
    base = tolerance_of(run.subject.precision)
    if dtype := find_narrow(run):
        return Calibration(base, undecided=causes.NARROW.format(dtype=dtype))
    noise = measure_noise(run, record)
    again = relative_distance(run.record(record.names), record)
    if again <= base and noise < _LARGE:
        return Calibration(max(base, MARGIN * noise), noise=noise)
    if again <= base:
        other = type(run)(run.subject, run.split, seed=1)
        other.set_state(run.state, floating_only=True)  # integers may be the states of generators
        other.state = other.read_state()
        again = relative_distance(other.record(record.names), record)
    reason = causes.RANDOM.format(noise=again) if again > base else causes.ORDER.format(noise=noise)
    return Calibration(base, noise=noise, undecided=reason, random=again > base)


def find_narrow(run: "LoopRun") -> str:
    """Returns the dtype of 16 bits in which a layer of either version of Keras computes, or ""."""
    dtypes = [getattr(layer, "compute_dtype", None) for layer in run.contents.layers]
    return next((str(dtype) for dtype in dtypes if dtype in _NARROW), "")


def measure_noise(run: "LoopRun", record: Record) -> float:
    """Returns the largest relative difference that another order of the rows makes."""
    return relative_distance(_record_reversed(run, record), record)


def _record_reversed(run: "LoopRun", record: Record) -> Record:
    run.order = slice(None, None, -1)
    try:
        return run.record(record.names)
    finally:
        run.order = slice(None)


def relative_distance(record: Record, expected: Record) -> float:
    """Returns the largest difference of an update, a loss or a statistic, relative to its size.

    An update that is much smaller than the others consists of rounding errors, such as the update of
    a bias before batch normalization.
    """
    distances = [0.0]
    for values, others in zip(record.steps, expected.steps, strict=True):
        sizes = {
            name: float(np.abs(value).max(initial=0.0))
            for name, value in others.items()
            if name[0] in ("update", "loss", "statistic")
        }
        largest = max(sizes.values(), default=0.0)
        for name, size in sizes.items():
            distance = float(np.abs(values[name] - others[name]).max(initial=0.0))
            if largest > 0:
                distances.append(distance / max(size, _SMALL * largest))
    return max(distances)


def explain_random(evidence: Evidence) -> Finding | None:
    """Recognizes mistakes in spite of random numbers: equal draws, and draws in an evaluation."""
    run: Any = evidence.run
    if find_narrow(run):
        return None
    reference = run.record()
    split = Split(2 * (run.split.batch // 2), 2)
    if not reference.trains:
        other = _record_reversed(run, reference).steps[0]
        for (kind, name), value in reference.steps[0].items():
            distance = float(np.abs(other[kind, name] - value).max(initial=0.0))
            if kind in ("loss", "metric") and distance:
                return Difference(kind, name, split, 0, None, distance), causes.EVALUATION_NOISE
        return None
    # If only another order of the rows changes the result, it may do so by rounding errors.
    threshold = _CLOSE if evidence.calibration.random else _ROUNDING
    if attempt(lambda: _draws_same_numbers(evidence, split, threshold)):
        first = next(name for kind, name in reference.steps[0] if kind == "update")
        size = float(np.abs(reference.flat_update()).max())
        return Difference("update", first, split, 0, None, size), causes.SAME_NUMBERS
    return None


def _draws_same_numbers(evidence: Evidence, split: Split, threshold: float) -> bool:
    """Returns whether two replicas with the same rows compute the same as one of them.

    The rows are all equal, so that only random numbers can make them different.
    """
    subject = evidence.subject.select([0] * split.batch)
    half = subject.start(Split(split.batch // 2)).record(steps=1)
    both, several = (
        subject.start(each).record(half.names, steps=1) for each in (split.reference, split)
    )
    return relative_distance(several, half) < _CLOSE and relative_distance(both, half) > threshold
