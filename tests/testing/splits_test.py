"""Which splits are compared."""

import pytest

from ctl.data.layout import Layout
from ctl.errors import UsageError
from ctl.testing import splits
from ctl.testing.splits import Split


@pytest.mark.parametrize("batch", [1, 3, 5, 8, 9])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_shares_are_those_of_the_feed(batch, replicas):
    layout, split = Layout(batch, replicas), Split(batch, replicas)
    assert split.shares == layout.row_counts()
    assert (split.rows, split.even) == (layout.rows_per_replica, layout.even)


@pytest.mark.parametrize("replicas", [(1, 2), (1, 2, 4), (1, 3), (2, 8)])
def test_default_splits_are_even_uneven_and_empty_with_and_without_accumulation(replicas):
    found = splits.chosen(replicas, (1, 2))
    several = [s for s in found if s.replicas == max(replicas)]
    assert any(s.even for s in several)
    assert any(not s.even and len(set(s.shares)) > 1 for s in several)
    assert any(0 in s.shares for s in several)
    for count in replicas:
        assert any(s.replicas == count and s.micro_batches == 2 for s in found)
    assert all(s != s.reference for s in found)


def test_thorough_takes_every_combination():
    found = splits.chosen((1, 2), (1, 2), (8, 5), thorough=True)
    assert len(found) == len(set(found)) == 2 * 2 * 2 - 2


def test_a_split_says_what_it_is():
    assert str(Split(5, 4)) == "4 replicas (2 + 2 + 1 + 0 rows of 5), accumulation 1"
    assert str(Split(4, 1, 2)) == "1 replica (4 rows of 4), accumulation 2"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (((), (1,)), "replicas is"),
        (((1, 2), (0,)), "accumulation is"),
        (((1,), (1,)), "nothing to compare"),
    ],
)
def test_nothing_to_compare_is_told_in_a_line(arguments, line):
    with pytest.raises(UsageError, match=line):
        splits.chosen(*arguments)
