"""The time of a process by activity, with a clock that the test sets."""

from ctl.loop.wall_clock import WallClock


class Time:
    now = 100.0

    def __call__(self):
        return self.now


def test_nested_activities_count_for_themselves_alone():
    time = Time()
    clock = WallClock(started=90.0, clock=time)
    time.now = 103.0
    clock.mark_started()
    with clock.measure("steps"):
        time.now += 5
        with clock.measure("saving"):
            time.now += 2
        time.now += 1
    time.now += 4
    assert clock.read() == {"total": 25.0, "starting": 13.0, "steps": 6.0, "saving": 2.0}
    assert clock.read(compiling=1.5)["steps"] == 4.5


def test_time_of_a_running_activity_is_read_too():
    time = Time()
    clock = WallClock(clock=time)
    with clock.measure("steps"):
        time.now += 3
        assert clock.read() == {"total": 3.0, "steps": 3.0}
        time.now += 1
    assert clock.read()["steps"] == 4.0
