"""Examples a second, of training alone."""

from ctl.loop.throughput import Throughput


def test_the_first_loop_does_not_count():
    speed = Throughput(batch=10)
    speed.add(5, seconds=100.0)
    assert speed.examples_per_second is None and speed.seconds_for(7) is None
    speed.add(4, seconds=2.0)
    speed.add(6, seconds=3.0)
    assert speed.examples_per_second == 20.0  # 10 steps of 10 in 5 s
    assert speed.seconds_for(7) == 3.5
