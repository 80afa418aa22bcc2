"""Measures rounding errors and randomness on one replica."""

import dataclasses

import numpy as np

from ctl.testing.comparison import tolerance_of
from ctl.testing.loops import causes
from ctl.testing.loops.runner import LoopRun, LoopSpec, State
from ctl.testing.recording import Record

MARGIN = 8.0  # on several replicas, more sums have another order than on one
_SMALL = 1e-3  # relative to the largest value: smaller ones consist of rounding errors
_ROUNDING = 1e-9  # relative to the largest update, in float64
_NARROW = ("bfloat16", "float16")
_LARGE = 1e-2  # relative; no rounding error of a few steps in float32


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The precision with which the splits of a loop can be compared.

    Attributes:
        tolerance: maximum error of an element, relative to the largest element.
        noise: the largest relative difference that another order of the rows makes.
        undecided: why the values cannot be compared; "" if they can be.
        narrow: whether a layer computes in 16 bits, whose rounding errors are as large as mistakes.
        random: whether the result depends on more than the values and the order of the rows.
    """

    tolerance: float
    noise: float
    undecided: str = ""
    narrow: bool = False
    random: bool = False


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
    if dtype := find_narrow(run):
        return Calibration(base, 0.0, causes.NARROW.format(dtype=dtype), narrow=True)
    noise = measure_noise(run, state, record)
    again = relative_distance(run.record(state, record.names), record)
    if again > base:
        return Calibration(base, noise, causes.RANDOM.format(noise=again), random=True)
    if noise < _LARGE:
        return Calibration(max(base, MARGIN * noise), noise)
    other = LoopRun(spec, run.split, seed=1)
    other.set_state(state, floating_only=True)  # integers may be the states of random generators
    seeded = relative_distance(other.record(other.state(), record.names), record)
    if seeded > base:
        return Calibration(base, noise, causes.RANDOM.format(noise=seeded), random=True)
    return Calibration(base, noise, causes.ORDER.format(noise=noise))


def find_narrow(run: LoopRun) -> str:
    """Returns the dtype of 16 bits in which a layer of either version of Keras computes, or ""."""
    dtypes = [getattr(layer, "compute_dtype", None) for layer in run.contents.layers]
    return next((str(dtype) for dtype in dtypes if dtype in _NARROW), "")


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


def find_zero_updates(record: Record) -> set[str]:
    """Names the variables whose gradients are zero except for rounding errors, which Adam amplifies.

    Args:
        record: the record of a loop under plain SGD.
    """
    sizes = {
        name: max(float(np.abs(values["update", name]).max(initial=0.0)) for values in record.steps)
        for kind, name in record.steps[0]
        if kind == "update"
    }
    largest = max(sizes.values(), default=0.0)
    return {name for name, size in sizes.items() if size < _ROUNDING * largest}
