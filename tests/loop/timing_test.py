"""Timers, the time of a process by activity, and examples per second, by a clock that the test sets."""

import pytest

from ctl.loop.timing import Every, Throughput, WallClock


@pytest.mark.parametrize(
    ("value", "every"),
    [(500, Every(500)), ("30 minutes", Every(seconds=1800.0)), (Every(at=(7,)), Every(at=(7,)))],
)
def test_interval_is_a_number_of_steps_or_a_time(value, every):
    assert Every.of(value) == every


def test_nested_activities_count_for_themselves_alone(clock):
    wall_clock = WallClock(started=90.0)
    clock.now = 103.0
    wall_clock.mark_started()
    with wall_clock.measure("steps"):
        clock.now += 5
        with wall_clock.measure("saving"):
            clock.now += 2
            assert wall_clock.read() == {
                "total": 20.0,
                "starting": 13.0,
                "steps": 5.0,
                "saving": 2.0,
            }
        clock.now += 1
    clock.now += 4
    assert wall_clock.read() == {"total": 25.0, "starting": 13.0, "steps": 6.0, "saving": 2.0}
    assert wall_clock.read(compiling=1.5)["steps"] == 4.5


def test_first_loop_is_excluded_from_the_speed():
    throughput = Throughput(batch=10)
    throughput.add(5, seconds=100.0)
    assert throughput.examples_per_second is None and throughput.seconds_for(7) is None
    throughput.add(4, seconds=2.0)
    throughput.add(6, seconds=3.0)
    assert throughput.examples_per_second == 20.0  # 10 steps of 10 in 5 s
    assert throughput.seconds_for(7) == 3.5
    assert throughput.compile_seconds == 97.5


def test_wait_for_input_is_that_of_the_last_loop_and_of_all_loops():
    throughput = Throughput(batch=10)
    assert throughput.input_wait is None
    throughput.add(10, seconds=50.0)
    throughput.add_input_wait(5.0)
    assert throughput.input_wait == 0.1  # of the first loop too, which compiles
    throughput.add(10, seconds=2.0)
    throughput.add_input_wait(1.5)
    assert (throughput.input_wait, throughput.input_seconds) == (0.75, 6.5)
