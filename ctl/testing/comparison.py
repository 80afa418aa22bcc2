"""Record against record: which quantities differ by more than rounding. Loads no TensorFlow."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ctl.testing.report import Difference, factor_of

if TYPE_CHECKING:
    from ctl.testing.recording import Name, Record

# The distance from 1 to the next number.
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_KEPT = 0.6  # of the digits of a number, what right code keeps at least in a few steps
_SMALL = 1e-3  # of the largest update: a gradient that should be zero is all rounding
_METRIC = 1e-5  # metrics often count in float32, whatever the model computes in


def tolerance_of(precision: str) -> float:
    """How far right code may be off, relative to the largest element: 4e-10 in float64.

    Between a rounding and 1 there are `log(1 / epsilon)` digits. Right code loses a few of them,
    wrong code nearly all: a factor of 1.01 is off by 1e-2.

    Args:
        precision: what is computed in.
    """
    return _EPSILON[precision] ** _KEPT


def compare(record: "Record", reference: "Record", precision: str, tolerance: float) -> list:
    """The quantities of a split that are not those of one replica.

    Only those of the first step that has any: all later steps follow from it.

    Args:
        record: of the split.
        reference: of the same batches on one replica.
        precision: what both were computed in.
        tolerance: of an element, relative to the largest.

    Returns:
        A list of `Difference`.
    """
    found = list(_evaluation(record, reference, tolerance))
    for step, (values, wanted) in enumerate(zip(record.steps, reference.steps, strict=True)):
        copies = [c for c in record.copies if c.step == step]
        for copy in copies:
            kind, name = copy.name
            # Where the copies are a loss' own sums, in another order, only rounding parts them.
            scale = np.abs(wanted[copy.name]).max(initial=0.0) + np.abs(
                record.weights.get(name, np.zeros(1))
            ).max(initial=0.0)
            if not copy.distance <= tolerance * max(scale, _SMALL):
                found.append(Difference("copy", name, record.split, step, None, copy.distance))
        bounds = _bounds(wanted, reference.weights, _EPSILON[precision], tolerance)
        for (kind, name), want in wanted.items():
            got = values[kind, name]
            distance = _distance(got, want)
            if not distance <= bounds[kind, name]:
                factor = factor_of(got, want, tolerance)
                found.append(Difference(kind, name, record.split, step, factor, distance))
        if found:
            break
    return found


def _evaluation(record: "Record", reference: "Record", tolerance: float) -> Iterator[Difference]:
    for name, want in reference.evaluation.items():
        got = record.evaluation.get(name)
        if got is None:
            continue
        distance = _distance(got, want)
        if not distance <= max(tolerance, _METRIC) * max(np.abs(want).max(initial=0.0), _SMALL):
            factor = factor_of(got, want, _METRIC)
            yield Difference("evaluation", name[1], record.split, 0, factor, distance)


def _bounds(
    wanted: Mapping["Name", np.ndarray],
    weights: Mapping[str, np.ndarray],
    epsilon: float,
    tolerance: float,
) -> dict["Name", float]:
    """How far each quantity may be off."""
    sizes = {name: float(np.abs(value).max(initial=0.0)) for name, value in wanted.items()}
    largest = max((size for (kind, _), size in sizes.items() if kind == "update"), default=0.0)
    bounds = {}
    for (kind, name), size in sizes.items():
        if kind == "update":  # a difference of two weights has their rounding
            weight = np.abs(weights[name]).max(initial=0.0) if name in weights else 0.0
            bound = tolerance * max(size, _SMALL * largest) + 16 * epsilon * float(weight)
        elif kind == "metric":
            bound = max(tolerance, _METRIC) * max(size, _SMALL)
        else:
            bound = tolerance * max(size, _SMALL)
        bounds[kind, name] = bound
    return bounds


def _distance(got: np.ndarray, want: np.ndarray) -> float:
    if got.shape != want.shape:
        return float("inf")
    if not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return float("inf")
    gap = np.abs(got.astype(np.float64) - want.astype(np.float64))
    return float(np.nan_to_num(gap, nan=0.0).max(initial=0.0))
