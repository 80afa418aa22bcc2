"""Records are compared up to rounding errors."""

import numpy as np
import pytest

from ctl.testing.comparison import compare, tolerance_of
from ctl.testing.equivalence_report import NotComparable
from ctl.testing.loop_record import CopyMismatch, LoopRecord
from ctl.testing.splits import Split

SPLIT = Split(4, replicas=2)
UPDATE, LOSS, METRIC = ("update", "w:0"), ("loss", "loss"), ("metric", "accuracy")
VALUES = {UPDATE: [0.5, -2.0], LOSS: 1.5, METRIC: 0.25}


def record(*steps, mismatches=(), evaluation=None, split=SPLIT):
    arrays = [{name: np.asarray(v, float) for name, v in step.items()} for step in steps]
    evaluation = {("evaluation", k): np.asarray(v) for k, v in (evaluation or {}).items()}
    return LoopRecord(split, {UPDATE: np.ones(2)}, arrays, evaluation, list(mismatches))


def differences(changed, reference, tolerance=1e-9):
    return compare(changed, reference, "float64", tolerance)


def test_rounding_errors_are_no_difference():
    nearly = {UPDATE: [0.5 + 1e-12, -2.0], LOSS: 1.5 + 1e-12, METRIC: 0.25 + 1e-7}
    assert differences(record(nearly), record(VALUES)) == []


@pytest.mark.parametrize(
    ("name", "value", "factor"),
    [
        (UPDATE, [1.0, -4.0], 2),
        (UPDATE, [0.5, -2.1], None),
        (LOSS, 0.75, 0.5),
        (METRIC, 0.26, 1.04),
    ],
)
def test_difference_has_its_factor(name, value, factor):
    (difference,) = differences(record({**VALUES, name: value}), record(VALUES))
    assert (difference.kind, difference.name) == name
    assert difference.split == SPLIT
    assert difference.factor == (None if factor is None else pytest.approx(factor))


def test_only_the_first_step_with_a_difference_is_reported():
    wrong = {**VALUES, LOSS: 2.0}
    found = differences(record(VALUES, wrong, wrong), record(VALUES, VALUES, VALUES))
    assert [d.step for d in found] == [1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_value_that_is_not_finite_is_a_difference(value):
    (difference,) = differences(record({**VALUES, LOSS: value}), record(VALUES))
    assert difference.distance == np.inf
    assert differences(record({**VALUES, LOSS: value}), record({**VALUES, LOSS: value})) == []


@pytest.mark.parametrize(
    "changed", [{UPDATE: [0.5, -2.0]}, {**VALUES, ("metric", "loss_of_0"): 1.5}]
)
def test_other_names_are_not_comparable(changed):
    with pytest.raises(NotComparable, match=r"there are other names .* \((accuracy, )?loss"):
        differences(record(changed), record(VALUES))


def test_another_shape_is_a_difference():
    (difference,) = differences(record({**VALUES, UPDATE: [1.0]}), record(VALUES))
    assert difference.factor is None


def test_small_updates_are_compared_relative_to_the_largest():
    bias = ("update", "bias:0")
    rounding, reference = {**VALUES, bias: 1e-13}, {**VALUES, bias: 0.0}
    assert differences(record(rounding), record(reference)) == []


def test_average_follows_a_variable_that_an_optimizer_moves_by_rounding_errors():
    # Adam moves the bias of a convolution before batch normalization, whose gradient is 0.
    bias, average = ("update", "bias:0"), ("state", "ema/bias:0")
    moved, reference = {**VALUES, bias: 8e-6, average: 7e-6}, {**VALUES, bias: 0.0, average: 0.0}

    def find(changed):
        return compare(record(*changed), record(reference, reference), "float64", 1e-9, {"bias:0"})

    assert find([moved, moved]) == []
    (difference,) = find([moved, {**moved, average: 2e-5}])
    assert (difference.name, difference.step) == ("ema/bias:0", 1)
    (difference,) = find([moved, {**moved, UPDATE: [0.5, -2.1]}])
    assert (difference.name, difference.step) == ("w:0", 1)


def test_copies_that_differ_are_reported():
    mismatch = CopyMismatch(UPDATE, 0, distance=0.5, changed=(0,), replicas=2)
    (difference,) = differences(record(VALUES, mismatches=[mismatch]), record(VALUES))
    assert (difference.kind, difference.distance) == ("copy", 0.5)
    rounding = CopyMismatch(UPDATE, 0, distance=1e-13, changed=(0, 1), replicas=2)
    assert differences(record(VALUES, mismatches=[rounding]), record(VALUES)) == []


def test_evaluations_are_compared_if_both_were_made():
    reference = record(VALUES, evaluation={"loss": 1.0})
    (difference,) = differences(record(VALUES, evaluation={"loss": 2.0}), reference)
    assert (difference.kind, difference.factor) == ("evaluation", 2)
    assert differences(record(VALUES), reference) == []


def test_tolerances():
    assert tolerance_of("float64") == pytest.approx(4e-10, rel=0.1)
    assert tolerance_of("float32") == pytest.approx(7e-5, rel=0.1)
