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


def test_wait_for_input_is_that_of_the_last_loop_and_of_all_loops():
    throughput = Throughput(batch=10)
    assert throughput.input_wait is None
    throughput.add(10, seconds=50.0)
    throughput.add_input_wait(5.0)
    assert throughput.input_wait == 0.1  # of the first loop too, which compiles
    throughput.add(10, seconds=2.0)
    throughput.add_input_wait(1.5)
    assert (throughput.input_wait, throughput.input_seconds) == (0.75, 6.5)
