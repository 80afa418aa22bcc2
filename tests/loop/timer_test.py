"""Decisions by the clock."""

import pytest

from ctl.loop.timer import Timer


class Processes:
    """The chief's answer, and the calls."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def broadcast_from_chief(self, value):
        self.calls.append(value)
        return self.answer


def test_timer_is_due_when_its_seconds_have_passed_since_the_last_restart():
    now = [100.0]
    timer = Timer(60.0, clock=lambda: now[0])
    due = []
    for now[0] in (159.0, 160.0, 161.0):
        due.append(timer.is_due())
    assert due == [False, True, True]
    timer.restart()
    assert not timer.is_due()
    now[0] = 221.0
    assert timer.is_due()


@pytest.mark.parametrize("chief_is_due", [False, True])
def test_clock_of_the_chief_decides(chief_is_due):
    now = [0.0]
    timer = Timer(60.0, clock=lambda: now[0])
    now[0] = 0.0 if chief_is_due else 90.0  # this process's own clock differs
    processes = Processes(chief_is_due)
    assert timer.all_due(processes) is timer.due is chief_is_due
    assert processes.calls == [not chief_is_due]
    timer.restart()
    assert not timer.due


def test_timer_of_no_seconds_is_never_due_and_does_not_communicate():
    processes = Processes(True)
    assert not Timer(0).all_due(processes) and processes.calls == []
