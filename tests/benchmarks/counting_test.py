"""The check that every example of every epoch was used exactly once."""

import numpy as np
import pytest

from benchmarks import counting

STEPS = 200  # 1400 examples: one epoch and 397


def complete_counts():
    counts = np.zeros([3, counting.EXAMPLES], np.int32)
    counts[0] = 1
    counts[1, :397] = 1
    return counts


def test_counts_of_one_per_example_are_accepted():
    assert counting.check_consumed(complete_counts().ravel(), STEPS) == (1, 397)


@pytest.mark.parametrize(
    ("position", "count", "message"),
    [
        ((0, 17), 2, "Example 17 was consumed 2 times in epoch 0"),
        ((1, 17), 2, "The last epoch has 398 examples, but must have 397, each once"),
        ((2, 17), 1, "The last epoch has 398 examples"),
        ((1, [0, 1]), [2, 0], "must have 397, each once"),
    ],
)
def test_lost_repeated_or_early_examples_are_reported(position, count, message):
    counts = complete_counts()
    counts[position] = count
    with pytest.raises(ValueError, match=message):
        counting.check_consumed(counts.ravel(), STEPS)
