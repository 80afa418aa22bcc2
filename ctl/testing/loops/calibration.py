"""Measures on one replica what can be told apart: rounding errors and random numbers."""

import dataclasses

import numpy as np

from ctl.testing.comparison import tolerance_of
from ctl.testing.loops import causes
from ctl.testing.loops.runner import LoopRun, LoopSpec, State
from ctl.testing.recording import Record

MARGIN = 8.0  # on several replicas, more sums have another order than on one
_SMALL = 1e-3  # of the largest value: smaller ones consist of rounding errors
_ROUNDING = 1e-9  # of the largest update, in float64
_LARGE = 1e-2  # relative; no rounding error of a few steps in float32


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What the comparison can tell about a loop.

    Attributes:
        tolerance: maximum error of an element, relative to the largest element.
        noise: the largest relative difference that another order of the rows makes.
        undecided: why nothing can be told about values; "" if they can be compared.
    """

    tolerance: float
    noise: float
    undecided: str = ""


def calibrate(spec: LoopSpec, run: LoopRun, state: State, record: Record) -> Calibration:
    """Runs a loop on one replica with the rows of each batch in another order.

    The order must not matter, so that every difference is a rounding error, in the precision that the
    loop computes in, or shows that no comparison is possible.

    Args:
        spec: what to run.
        run: the loop on one replica.
        state: the state before the first step.
        record: what the loop computes from it.
    """
    base = tolerance_of(spec.precision)
    noise = measure_noise(run, state, record)
    again = relative_distance(run.record(state, record.names), record)
    if again > base:
        return Calibration(base, noise, causes.RANDOM.format(noise=again))
    if noise < _LARGE:
        return Calibration(max(base, MARGIN * noise), noise)
    other = LoopRun(spec, run.split, seed=1)
    other.set_state(state, floating_only=True)  # integers may be the states of random generators
    seeded = relative_distance(other.record(other.state(), record.names), record)
    if seeded > base:
        return Calibration(base, noise, causes.RANDOM.format(noise=seeded))
    return Calibration(base, noise, causes.ORDER.format(noise=noise))


def measure_noise(run: LoopRun, state: State, record: Record) -> float:
    """Returns the largest relative difference that another order of the rows makes.

    Args:
        run: the loop on one replica.
        state: the state before the first step.
        record: what the loop computes from it.
    """
    order = np.arange(run.split.batch)[::-1]
    return relative_distance(run.record(state, record.names, order=order), record)


def relative_distance(record: Record, expected: Record) -> float:
    """Returns the largest difference of an update, a loss or a statistic, relative to its size.

    An update that is much smaller than the others consists of rounding errors, such as that of a bias
    before batch normalization.
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


def find_zero_updates(record: Record) -> set[str]:
    """Names the variables whose gradients are zero but for rounding errors, which Adam amplifies.

    Args:
        record: of a loop under plain SGD.
    """
    sizes = {
        name: max(float(np.abs(values["update", name]).max(initial=0.0)) for values in record.steps)
        for kind, name in record.steps[0]
        if kind == "update"
    }
    largest = max(sizes.values(), default=0.0)
    return {name for name, size in sizes.items() if size < _ROUNDING * largest}
