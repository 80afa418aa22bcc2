"""Measures the rounding errors and the randomness of a loop on one replica."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ctl.graphs import ops
from ctl.graphs.dataflow import ancestors
from ctl.graphs.places import place_of
from ctl.testing.comparison import tolerance_of
from ctl.testing.loop_record import LoopRecord
from ctl.testing.subjects.base import Calibration

if TYPE_CHECKING:
    from ctl.testing.subjects.loop import LoopRun

MARGIN = 8.0  # on several replicas, more sums have another order than on one
_SMALL = 1e-3  # relative to the largest value: smaller ones consist of rounding errors
_NARROW = ("bfloat16", "float16")
_DATA = ("Placeholder", "IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue")
_EXACT = ("Cast", "ConcatV2", "Const", "GatherV2", "Identity", "Reshape", "StridedSlice")
_LARGE = 1e-2  # relative; no rounding error of a few steps in float32
# Why a loop cannot be compared; as parts of a sentence.
_RANDOM = (
    "on one replica already, a second run with another random seed changes the result by up to "
    "{noise:.2g} of its size: the loop draws random numbers, such as dropout, and several replicas "
    "draw other ones. Build the loop without them for this test (Dropout(0.0))"
)
_REPEATED = (
    "on one replica already, a second run from the same `variables` changes the result by up to "
    "{noise:.2g} of its size: the loop draws random numbers, such as dropout, or changes variables that "
    "are not in `variables`, such as those of an optimizer. Build the loop without random numbers for "
    "this test (Dropout(0.0)), and list all variables"
)
_ORDER = (
    "on one replica already, another order of the rows in the global batch changes the result by "
    "up to {noise:.2g} of its size: the loop draws random numbers with a fixed seed, or depends on "
    "a row's position in the batch"
)
_IN_16_BITS = (
    "a layer computes in {dtype}, whose rounding errors are as large as the effect of a mistake: "
    "set the policy to float32 or float64 for this test"
)


def calibrate(run: "LoopRun", record: LoopRecord) -> Calibration:
    """Runs a loop on one replica with the rows of each batch in another order.

    The order must not matter, so that every difference is a rounding error, in the precision that the
    loop computes in, or shows that no comparison is possible.

    Args:
        run: the loop on one replica.
        record: what it computes.
    """
    base = tolerance_of(run.subject.precision)
    if dtype := find_narrow(run):
        return Calibration(base, undecided=_IN_16_BITS.format(dtype=dtype))
    noise = measure_noise(run, record)
    again = relative_distance(run.record(record.names), record)
    if again <= base and noise < _LARGE:
        return Calibration(max(base, MARGIN * noise), noise=noise)
    if again > base:
        reason = _REPEATED.format(noise=again)
    else:
        other = type(run)(run.subject, run.split, seed=1)
        other.set_state(run.state, floating_only=True)  # integers may be the states of generators
        other.state = other.read_state()
        again = relative_distance(other.record(record.names), record)
        reason = _RANDOM.format(noise=again) if again > base else _ORDER.format(noise=noise)
    return Calibration(base, noise=noise, undecided=reason, random=again > base)


def find_narrow(run: "LoopRun") -> str:
    """Returns the dtype of 16 bits in which a layer of either version of Keras computes, or ""."""
    dtypes = [getattr(layer, "compute_dtype", None) for layer in run.contents.layers]
    return next((str(dtype) for dtype in dtypes if dtype in _NARROW), "")


def measure_noise(run: "LoopRun", record: LoopRecord) -> float:
    """Returns the largest relative difference that another order of the rows makes."""
    return relative_distance(record_reversed(run, record), record)


def record_reversed(run: "LoopRun", record: LoopRecord) -> LoopRecord:
    """Records a loop again, with the rows of each batch in reverse order."""
    run.order = slice(None, None, -1)
    try:
        return run.record(record.names)
    finally:
        run.order = slice(None)


def relative_distance(record: LoopRecord, expected: LoopRecord) -> float:
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


def find_cast(graphs: Iterable[tf.Graph]) -> str:
    """Names the line of a cast to float64 of what is computed in fewer digits; "" if there is none."""
    for graph in graphs:
        for op in ops.with_called(graph.get_operations()):
            if op.type == "Cast" and op.outputs[0].dtype == tf.float64 and _is_computed(op):
                dtype = op.inputs[0].dtype.name
                return f"computed in float64, but {place_of(op)} casts what is computed in {dtype}"
    return ""


def _is_computed(cast: Any) -> bool:
    """Returns whether a cast gets floats of fewer digits, with rounding errors, of rows or of draws."""
    is_narrow = cast.inputs[0].dtype.is_floating and cast.inputs[0].dtype.size < 8
    sources = [*ancestors(cast.inputs[0])] if is_narrow else []
    return any("Random" in x.op.type for x in sources) or (
        any(x.op.type in _DATA and x.dtype != tf.resource for x in sources)
        and any(x.dtype.is_floating and x.op.type not in (*_DATA, *_EXACT) for x in sources)
    )
