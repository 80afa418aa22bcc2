"""Compares the records of two splits: which quantities differ by more than rounding errors."""

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from ctl.errors import list_some
from ctl.testing.contents import Name
from ctl.testing.equivalence_report import Difference, NotComparable, common_factor
from ctl.testing.loop_record import LoopRecord

_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_EXPONENT = 0.6  # right code keeps at least this share of a number's digits in a few steps
_SMALL = 1e-3  # relative to the largest update: smaller ones consist of rounding errors
_METRIC = 1e-5  # metrics often accumulate in float32, whatever the model computes in


def tolerance_of(precision: str) -> float:
    """Returns the tolerance relative to the largest element, 4e-10 in float64.

    A dtype has `log(1 / epsilon)` digits. Right code loses a few of them, wrong code nearly all: a
    factor of 1.01 is an error of 1e-2.

    Args:
        precision: dtype of the computation.
    """
    return _EPSILON[precision] ** _EXPONENT


def compare(
    record: LoopRecord,
    reference: LoopRecord,
    precision: str,
    tolerance: float,
    rounding: Collection[str] = (),
) -> list[Difference]:
    """Finds the quantities of a split that differ from those on one replica.

    Stops after the first step with a difference, since the differences of later steps follow from it.

    Args:
        record: the record of the split.
        reference: the record of the same batches on one replica.
        precision: dtype of both computations.
        tolerance: maximum error of an element, relative to the largest element.
        rounding: the variables that an optimizer moves by rounding errors, such as a bias before a
            batch normalization. They are not compared, and averages of variables may follow them.
    """
    differences = list(_compare_evaluations(record, reference, tolerance))
    drift = 0.0
    for step, (values, expected) in enumerate(zip(record.steps, reference.steps, strict=True)):
        if other := sorted({name for _, name in values.keys() ^ expected.keys()}):
            raise NotComparable(
                f"On {record.split} there are other names of values or variables than on one replica "
                f"({list_some(other)}): use the same names on every number of replicas."
            )
        moved = (key for key in expected if key[0] == "update" and key[1] in rounding)
        drift += max((_distance(values[key], expected[key]) for key in moved), default=0.0)
        for mismatch in (m for m in record.mismatches if m.step == step):
            name, distance = mismatch.name[1], mismatch.distance
            # Copies that are sums in another order may differ by rounding errors.
            start = record.start.get(mismatch.name, np.zeros(1))
            scale = _largest(expected[mismatch.name]) + _largest(start)
            if name not in rounding and not distance <= tolerance * max(scale, _SMALL):
                differences.append(Difference("copy", name, record.split, step, None, distance))
        bounds = _bounds(expected, reference.start, _EPSILON[precision], tolerance)
        for (kind, name), value in expected.items():
            # Of a variable of a metric only the result matters: if each replica updates a mean with its
            # own mean, the result may be right, but its count is not 1.
            is_sum = kind == "metric" and any((kind, name) in stage for stage in reference.names)
            if is_sum or (kind == "update" and name in rounding):
                continue
            distance = _distance(values[kind, name], value)
            follows = drift if kind in ("state", "statistic") else 0.0
            if not distance <= bounds[kind, name] + follows:
                factor = common_factor(values[kind, name], value, tolerance)
                differences.append(Difference(kind, name, record.split, step, factor, distance))
        if differences:
            break
    return differences


def _compare_evaluations(
    record: LoopRecord, reference: LoopRecord, tolerance: float
) -> Iterator[Difference]:
    for (kind, name), value in record.evaluation.items():
        expected = reference.evaluation[kind, name]
        distance = _distance(value, expected)
        if not distance <= max(tolerance, _METRIC) * max(_largest(expected), _SMALL):
            factor = common_factor(value, expected, _METRIC)
            yield Difference(kind, name, record.split, 0, factor, distance)


def _bounds(
    expected: Mapping[Name, np.ndarray],
    start: Mapping[Name, np.ndarray],
    epsilon: float,
    tolerance: float,
) -> dict[Name, float]:
    """Returns the maximum distance of each quantity."""
    sizes = {name: _largest(value) for name, value in expected.items()}
    largest = max((size for (kind, _), size in sizes.items() if kind == "update"), default=0.0)
    bounds = {}
    for (kind, name), size in sizes.items():
        if kind == "update":
            # An update is the difference of two weights and has their rounding errors.
            rounding = 16 * epsilon * _largest(start.get((kind, name), np.zeros(1)))
            bounds[kind, name] = tolerance * max(size, _SMALL * largest) + rounding
        else:
            relative = max(tolerance, _METRIC) if kind == "metric" else tolerance
            bounds[kind, name] = relative * max(size, _SMALL)
    return bounds


def _largest(values: np.ndarray) -> float:
    """Returns the largest absolute value of the finite elements."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _distance(values: np.ndarray, expected: np.ndarray) -> float:
    if values.shape != expected.shape:
        return float("inf")
    if not np.array_equal(np.isfinite(values), np.isfinite(expected)):
        return float("inf")
    finite = np.isfinite(values)
    return _largest(values[finite].astype(np.float64) - expected[finite].astype(np.float64))
