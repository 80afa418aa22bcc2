"""The update of a random model, batch and set of options is that of one replica.

By default the cases are the same in each run. New ones, a thousand, with a printed seed:

    python -m pytest -n 0 -m slow --hypothesis-profile=long tests/properties

A failing case is reduced to its simplest form and printed as a `Case(...)`, which is run again by

    python -m tests.properties "Case(replicas=2, batch=3)"
"""

import collections
import random
from unittest import mock

import hypothesis
import pytest

from ctl.errors import UsageError
from ctl.update import loss
from tests.properties.case import cases
from tests.properties.case_trainer import find_differences

FIXED, MISTAKE, LONG = 4, 10, 1000  # cases; one takes about 4 s of processor time


def explore(count: int, **settings) -> None:
    """Compares random cases with one replica; fails at the first difference, in its simplest form."""
    outcomes = collections.Counter()
    seed = random.SystemRandom().randrange(2**32)

    @hypothesis.settings(max_examples=count, **settings)
    @hypothesis.given(cases())
    def check(case):
        try:
            differences = find_differences(case)
        except UsageError:
            outcomes["rejected"] += 1
            hypothesis.reject()
        outcomes["compared"] += 1
        assert not differences, "\n".join([str(case), *differences[:5]])

    if not hypothesis.settings.default.derandomize:
        print(f"seed {seed}")
        check = hypothesis.seed(seed)(check)
    check()
    print(dict(outcomes))
    assert outcomes["rejected"] <= 0.25 * outcomes["compared"], "too many cases are rejected"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_random_updates_are_those_of_one_replica():
    explore(FIXED if hypothesis.settings.default.derandomize else LONG)


@pytest.mark.slow
@pytest.mark.long
def test_planted_mistake_is_detected():
    """Padding counts; tests/update and tests/rows detect it, too."""

    def ignore_mask(sample_weight, row_mask, dtype):
        return sample_weight

    with (
        mock.patch.object(loss, "row_weights", ignore_mask),
        pytest.raises(AssertionError, match="Case"),
    ):
        explore(MISTAKE, phases=[hypothesis.Phase.generate])
