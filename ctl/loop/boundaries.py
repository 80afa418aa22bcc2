"""Computes where loops end: at multiples of intervals, no matter where a run was resumed."""

from collections.abc import Iterable


def next_boundary(step: int, end: int, intervals: Iterable[int]) -> int:
    """Returns the first multiple of an interval after `step`, or `end` if that comes first.

    Args:
        step: the current step.
        end: the step that no loop passes.
        intervals: numbers of steps; 0 for an interval without multiples.
    """
    multiples = [(step // interval + 1) * interval for interval in intervals if interval]
    return min([end, *multiples])
