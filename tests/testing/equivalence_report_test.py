"""The messages of a report."""

import numpy as np
import pytest

from ctl.testing.equivalence_report import Difference, Report, as_fraction, common_factor
from ctl.testing.splits import Split

SPLIT = Split(5, replicas=2)


def difference(kind="update", name="w:0", factor=2.0, distance=0.125):
    return Difference(kind, name, SPLIT, 0, factor, distance)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({}, "update of w:0 on {}, step 0: 2 times {}"),
        (dict(factor=None), "update of w:0 on {}, step 0: differs from {} by up to 0.125"),
        (dict(factor=1 + 1e-9), "update of w:0 on {}, step 0: differs from {} by up to 0.125"),
        (dict(kind="loss", factor=0.5), "w:0 on {}, step 0: 1/2 times {}"),
        (
            dict(kind="copy"),
            "copies of w:0 on {}, step 0: the replicas' copies differ by up to 0.125",
        ),
    ],
)
def test_difference_is_one_line(arguments, line):
    assert str(difference(**arguments)) == line.format(
        "2 replicas (3 + 2 rows)", "the value on one replica"
    )


def test_brief_line_is_that_of_a_check():
    assert difference().brief() == "w:0 on 3 + 2 rows: 2 times that of one replica"


def test_failure_starts_with_the_difference_and_its_cause():
    others = [difference(name=f"v{i}:0") for i in range(14)]
    refused, differences = {Split(5, 2, 2): "not supported"}, (difference(), *others)
    report = Report("T", "float64", (SPLIT,), refused, ("A note.",), differences, cause="Fix it.")
    lines = report.failure().splitlines()
    assert lines[0] == f"T: {difference()}. Fix it."
    assert lines[1] == "  Other differences:"
    assert lines[2] == f"    {others[0]}"
    refused = "  Not compared: 2 replicas (3 + 2 rows), accumulation 2: not supported"
    assert lines[13:] == ["    and 3 more", refused, "  A note."]
    assert not report.equivalent


def test_single_difference_is_a_single_line():
    report = Report("T", "float64", (SPLIT,), {}, differences=(difference(),), cause="Fix it.")
    assert report.failure() == f"T: {difference()}. Fix it."


@pytest.mark.parametrize(
    ("factor", "text"),
    [(2.0, "2"), (0.25, "1/4"), (5 / 6, "5/6"), (-2.0, "-2"), (0.123456, "0.1235")],
)
def test_factor_is_a_fraction_if_it_is_simple(factor, text):
    assert as_fraction(factor) == text


def test_common_factor():
    values = np.array([[1.0, -2.0], [3.0, 0.0]])
    assert common_factor(2 * values, values, 1e-9) == pytest.approx(2)
    assert common_factor(values + 1, values, 1e-9) is None
    assert common_factor(values, np.zeros([2, 2]), 1e-9) is None
    assert common_factor(np.full([2, 2], np.inf), values, 1e-9) is None
    assert common_factor(values[:1], values, 1e-9) is None
