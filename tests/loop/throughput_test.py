"""Examples per second, without the first loop."""

from ctl.loop.throughput import Throughput


def test_first_loop_is_excluded():
    throughput = Throughput(batch=10)
    throughput.add(5, seconds=100.0)
    assert throughput.examples_per_second is None and throughput.seconds_for(7) is None
    throughput.add(4, seconds=2.0)
    throughput.add(6, seconds=3.0)
    assert throughput.examples_per_second == 20.0  # 10 steps of 10 in 5 s
    assert throughput.seconds_for(7) == 3.5
