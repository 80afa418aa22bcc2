"""Which splits are compared."""

import pytest

from ctl.data.layout import Layout
from ctl.errors import UsageError
from ctl.testing import splits
from ctl.testing.splits import Split


@pytest.mark.parametrize("batch", [1, 3, 5, 8, 9])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_rows_are_those_of_the_input_pipeline(batch, replicas):
    layout, split = Layout(batch, replicas), Split(batch, replicas)
    assert split.row_counts == layout.row_counts()
    assert (split.rows_per_replica, split.even) == (layout.rows_per_replica, layout.even)


@pytest.mark.parametrize("replicas", [(1, 2), (1, 2, 4), (1, 3), (2, 8)])
def test_default_splits_are_even_uneven_and_empty_with_and_without_accumulation(replicas):
    chosen = splits.choose_splits(replicas, (1, 2))
    several = [s for s in chosen if s.replicas == max(replicas)]
    assert any(s.even for s in several)
    assert any(not s.even and len(set(s.row_counts)) > 1 for s in several)
    assert any(0 in s.row_counts for s in several)
    for count in replicas:
        assert any(s.replicas == count and s.micro_batches == 2 for s in chosen)
    assert all(s != s.reference for s in chosen)


def test_thorough_takes_all_combinations():
    chosen = splits.choose_splits((1, 2), (1, 2), (8, 5), thorough=True)
    assert len(chosen) == len(set(chosen)) == 2 * 2 * 2 - 2


def test_text_of_a_split():
    assert str(Split(5, 4)) == "4 replicas (2 + 2 + 1 + 0 rows)"
    assert str(Split(4, 1, 2)) == "1 replica (4 rows), accumulation 2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (1,)), r"replicas is \(\), but requires numbers of at least 1"),
        (((1, 2), (0,)), r"accumulation is \(0,\), but requires"),
        (((1,), (1,)), "leave nothing to compare"),
    ],
)
def test_arguments_that_leave_nothing_to_compare_are_an_error(arguments, message):
    with pytest.raises(UsageError, match=message):
        splits.choose_splits(*arguments)
