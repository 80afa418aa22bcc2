"""A run that ends after a time."""

import pytest

from ctl.errors import UsageError
from ctl.loop.actions.time_limit import TimeLimit


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_stop_is_requested_at_the_first_loop_after_the_time(clock):
    limit = TimeLimit("2 minutes", clock=clock)
    for clock.now in (150.0, 219.0):
        limit({})
        assert not limit.stop_reason
    clock.now = 221.0
    limit({})
    assert limit.stop_reason == "train.max_duration=2 minutes has passed"


def test_time_of_earlier_processes_counts(clock):
    first = TimeLimit("2 minutes", clock=clock)
    clock.now += 90
    state = first.get_state()
    assert state == {"seconds": 90.0}
    clock.now += 3600  # while no process trains
    second = TimeLimit("2 minutes", clock=clock)
    second.set_state(state)
    clock.now += 29
    second({})
    assert not second.stop_reason
    clock.now += 1
    second({})
    assert second.stop_reason


def test_rollback_does_not_give_time_back(clock):
    limit = TimeLimit("2 minutes", clock=clock)
    clock.now += 60
    state = limit.get_state()
    clock.now += 50
    limit.set_state(state)  # of the checkpoint that the rollback restores
    assert limit.get_state() == {"seconds": 110.0}


def test_duration_must_be_a_time():
    with pytest.raises(UsageError, match="is '5 epochs', but must be a time"):
        TimeLimit("5 epochs")
