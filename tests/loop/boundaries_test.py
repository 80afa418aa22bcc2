"""The steps at which loops end."""

import pytest

from ctl.loop import boundaries


@pytest.mark.parametrize(
    ("step", "end", "intervals", "boundary"),
    [
        (0, 100, (10,), 10),
        (9, 100, (10,), 10),
        (10, 100, (10,), 20),  # a boundary itself is over
        (13, 100, (10, 7), 14),
        (14, 100, (10, 7), 20),
        (95, 98, (10,), 98),
        (95, 98, (0,), 98),
        (95, 98, (), 98),
        (13, 100, (10, 0), 20),
    ],
)
def test_boundary_is_the_first_multiple_of_any_interval_up_to_the_end(
    step, end, intervals, boundary
):
    assert boundaries.next_boundary(step, end, intervals) == boundary


def test_resumed_run_has_the_boundaries_of_the_complete_one():
    steps = [0]
    while steps[-1] < 50:
        steps.append(boundaries.next_boundary(steps[-1], 50, (10, 15)))
    assert steps == [0, 10, 15, 20, 30, 40, 45, 50]
    for start in range(50):
        later = [step for step in steps if step > start]
        assert boundaries.next_boundary(start, 50, (10, 15)) == later[0]
