"""Mistakes are recognized by the coefficients of rows, regularization and weights."""

import math

import numpy as np
import pytest

from ctl.testing.diagnosis import causes, update_rules
from ctl.testing.diagnosis.evidence import Evidence
from ctl.testing.diagnosis.update_rules import Coefficients
from ctl.testing.loop_record import LoopRecord
from ctl.testing.splits import Split

EVEN, UNEVEN = Split(4, replicas=2), Split(5, replicas=2)
ACCUMULATED, UNEQUAL_PARTS = Split(4, micro_batches=2), Split(5, micro_batches=2)


def coefficients(rows, **terms):
    return Coefficients(np.array(rows, float), **terms)


@pytest.mark.parametrize(
    ("split", "rows", "cause"),
    [
        (EVEN, [2, 2, 2, 2], causes.MEANS_OR_TWICE),
        (EVEN, [0.5] * 4, causes.AVERAGED),
        (ACCUMULATED, [2] * 4, causes.MICRO_BATCH),
        (UNEQUAL_PARTS, [5 / 2, 5 / 2, 5 / 3, 5 / 3, 5 / 3], causes.MICRO_BATCH),
        (UNEVEN, [5 / 3, 5 / 3, 5 / 3, 5 / 2, 5 / 2], causes.OWN_ROWS.format(how="summed")),
        (UNEVEN, [5 / 6, 5 / 6, 5 / 6, 5 / 4, 5 / 4], causes.OWN_ROWS.format(how="averaged")),
        (UNEVEN, [1, 1, 1, 1, 2], causes.PADDING.format(times=2)),
        (UNEVEN, [0.5, 0.5, 0.5, 0.5, 1], causes.PADDING.format(times=2)),
        (EVEN, [1, 2, 3, 4], causes.DENOMINATOR.format(times="1, 2, 3, 4")),
        (EVEN, [3, 3, 3, 3], causes.DENOMINATOR.format(times=3)),
        (EVEN, [1, 1, 1, 1], None),
    ],
)
def test_rows(split, rows, cause):
    assert update_rules.explain_coefficients({split: coefficients(rows)}, split) == cause


def test_uneven_split_decides_between_causes_that_are_equal_on_even_ones():
    found = {EVEN: coefficients([0.5] * 4), UNEVEN: coefficients([5 / 6] * 3 + [5 / 4] * 2)}
    assert update_rules.explain_coefficients(found, EVEN) == causes.OWN_ROWS.format(how="averaged")
    twice = {EVEN: coefficients([2] * 4), UNEVEN: coefficients([2] * 5)}
    assert update_rules.explain_coefficients(twice, EVEN) == causes.REDUCED_TWICE
    # A loss that is divided by 5 // 2 rows.
    size = {EVEN: coefficients([2] * 4), UNEVEN: coefficients([2.5] * 5)}
    assert update_rules.explain_coefficients(size, EVEN) == causes.MEANS_OR_TWICE


def test_penalty():
    ones = [1.0] * 4
    penalty = update_rules.explain_coefficients({EVEN: coefficients(ones, penalty=2.0)}, EVEN)
    assert penalty == causes.WEIGHTS.format(times="2 times")
    extra = update_rules.explain_coefficients({EVEN: coefficients(ones, penalty=math.inf)}, EVEN)
    assert extra == causes.WEIGHTS.format(times="more than once")


def record(split, *updates):
    """A record of one variable with the given updates."""
    steps = [{("update", "w:0"): np.asarray(u, float)} for u in updates]
    return LoopRecord(split, {}, steps, {}, [])


def make_evidence(records, references):
    return Evidence(None, None, None, records, references)


def test_padding_is_no_cause_where_there_is_none():
    found = {UNEVEN: coefficients([1, 1, 1, 1, 2])}
    cause = update_rules.explain_coefficients(found, UNEVEN, pads=False)
    assert cause == causes.DENOMINATOR.format(times="1, 1, 1, 1, 2")


@pytest.mark.parametrize(("extra", "cause"), [((1.0, 3.0), causes.PART_SUMMED), ((1.0, 2.0), None)])
def test_one_term_that_grows_with_the_replicas(extra, cause):
    base, part = np.array([1.0, 2.0]), np.array([0.1, -0.3])
    two, four = Split(4, 2), Split(4, 4)
    records = {s: record(s, base + e * part) for s, e in zip((two, four), extra, strict=True)}
    evidence = make_evidence(records, {4: record(Split(4), base)})
    assert update_rules.explain_partial(evidence) == cause
