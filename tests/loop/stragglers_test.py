"""Which process is named as slow, by hand-computed times."""

import types

import pytest

from ctl.loop.stragglers import Stragglers, WorkerTimes, find_slow


def times(*own, seconds=10.0, input=0.0):
    """Times of processes whose own work takes `own` seconds of a loop, the rest of which they wait."""
    return [WorkerTimes(seconds, input, seconds - each) for each in own]


def make(members, **reporter):
    """Makes the action, with a controller of some processes and what it uses of a reporter."""
    stragglers, make = Stragglers(), types.SimpleNamespace
    fake = make(processes=make(members=members), reporter=make(**reporter), step=10)
    stragglers.begin(fake)
    return stragglers


def report(loops, first=()):
    """The events and lines of loops, of 10 steps each, after a first one that compiles."""
    members = [(f"worker {i}", f"host-{i}") for i in range(len(loops[0]))]
    events, lines = [], []

    def record(name, step, **fields):
        events.append((name, step, fields))

    stragglers = make(members, record=record, print_line=lines.append)
    for i, loop in enumerate([first or times(*[10.0] * len(members)), *loops]):
        stragglers.add(10 * i, loop)
    return events, lines


def test_times_are_divided_into_computing_waiting_and_input():
    worker = WorkerTimes(seconds=10.0, input=2.0, waiting=3.0)
    assert (worker.own, worker.computing) == (7.0, 5.0)
    # Waits for a reduction and for input that overlap are no negative time.
    assert WorkerTimes(seconds=10.0, input=8.0, waiting=9.0).computing == 0.0
    late = WorkerTimes(seconds=10.0, input=0.0, waiting=12.0)
    assert late.numbers() == {"computing": 0.0, "waiting": 10.0, "input": 0.0}


@pytest.mark.parametrize(
    ("own", "slow"),
    [
        ((4.0, 4.0, 6.1), {2}),
        ((4.0, 4.0, 5.9), set()),  # less than 1.5 times the median of 4
        ((4.0, 6.2), {1}),  # of two, the median is the faster one
        ((4.0, 4.1, 8.0, 9.0), {2, 3}),  # median 4.1
        ((0.1, 0.1, 0.9), set()),  # 8 % of the loop's time: the network takes it
        ((9.0, 9.0, 9.5), set()),
        ((0.0, 0.0, 5.0), {2}),
    ],
)
def test_slow_is_more_than_one_and_a_half_times_the_median_and_a_tenth_of_the_loop(own, slow):
    assert find_slow(times(*own)) == slow


def test_slow_process_is_reported_once_by_its_host_and_again_when_it_has_recovered():
    even, late = times(4.0, 4.0, 4.0), times(4.0, 4.0, 8.0, input=3.0)
    events, lines = report([even, late, late, late, even, even, late])
    fields = {"computing": 5.0, "waiting": 2.0, "input": 3.0, "median": 4.0}
    worker = {"worker": "worker 2", "host": "host-2"}
    assert events == [
        ("straggler", 30, {**worker, **fields}), ("straggler_ended", 60, worker),
    ]  # fmt: skip
    first, last = lines
    assert first == (
        "worker 2 on host-2 is slow, and the other workers wait for it: its steps took 8.0 s (5.0 s of "
        "computing, 3.0 s of waiting for input), 2.0 times the median of 3 workers (4.0 s), until step "
        "30. Check host-2 for other programs and a slower processor."
    )
    assert last == "worker 2 on host-2 is as fast as the others again at step 60."


def test_one_slow_loop_and_alternating_processes_are_noise():
    even, first, last = times(4.0, 4.0, 4.0), times(8.0, 4.0, 4.0), times(4.0, 4.0, 8.0)
    assert report([first, even, last, even, first, last, first, last]) == ([], [])
    assert report([last, even], first=last) == ([], [])  # the first loop compiles


def test_loops_are_added_up_to_a_second():
    # In every loop another process is late; in the sum of 30 loops, none is.
    def short(seconds, *shares):
        return times(*[seconds * share for share in shares], seconds=seconds)

    loops = [short(1 / 29.5, *[0.4 + 0.5 * (i % 3 == j) for j in range(3)]) for i in range(60)]
    assert report(loops) == ([], [])
    ((name, step, fields),), _ = report([short(1 / 19.5, 0.4, 0.4, 0.9)] * 60)
    assert (name, step, fields["worker"]) == ("straggler", 400, "worker 2")  # 2 x 20 loops
    assert fields["computing"] == pytest.approx(20 * 0.9 / 19.5)


def test_a_loop_waits_no_longer_than_it_takes():
    other = WorkerTimes(0.75, 0.0, 0.525)
    overlapping, busy = WorkerTimes(0.75, 0.0, 0.9), WorkerTimes(0.75, 0.0, 0.0)
    ((_, _, fields),), _ = report([(other, overlapping), (other, busy)] * 2)
    assert (fields["computing"], fields["waiting"]) == (0.75, 0.75)


def test_each_process_is_logged_with_its_seconds():
    logged = {}
    seconds = [[10.0, 1.0, 2.0], [10.0, 0.0, 4.0]]
    members = [("chief", "a"), ("worker 0", "b")]
    make(members, process_seconds=seconds, log_with_loop=logged.update)({})
    assert logged == {
        "workers/computing_seconds/chief": 7.0, "workers/waiting_seconds/chief": 2.0,
        "workers/input_seconds/chief": 1.0, "workers/computing_seconds/worker 0": 6.0,
        "workers/waiting_seconds/worker 0": 4.0, "workers/input_seconds/worker 0": 0.0,
    }  # fmt: skip
