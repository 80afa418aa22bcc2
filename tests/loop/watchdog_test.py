"""A run that hangs is reported with the stacks of its threads, and keeps waiting."""

import functools
import threading
import time

import pytest

from ctl.loop import watchdog
from ctl.loop.watchdog import FIRST, STALL_SECONDS, Watchdog


class Run:
    """A watched run, as its controller, whose step and clock the test sets; keeps what it reports."""

    def __init__(self, clock, capsys, seconds=STALL_SECONDS):
        self._clock, self._capsys, self.reporter = clock, capsys, self
        self.now = self.reads = 0
        self._lines, self.events = [], []
        self.watchdog = Watchdog(seconds)
        self.watchdog.begin(self)

    @property
    def step(self):
        return self.read()

    @property
    def lines(self):
        self._lines += self._capsys.readouterr().out.splitlines()
        return self._lines

    def read(self):
        self.reads += 1
        return self.now

    def record(self, name, step, **fields):
        self.events.append((name, step, fields))

    def short_loop(self):
        with self.watchdog.around(self.now, None):
            self.now += 1

    def check_after(self, seconds):
        self._clock.now += seconds
        self.watchdog.check_loop()


@pytest.fixture
def make(clock, tmp_path, monkeypatch, capsys):
    """Makes a run; its stacks are in the file `stacks`."""
    monkeypatch.setattr(watchdog, "_READ_SECONDS", 60.0)  # this process may be paused meanwhile
    with open(tmp_path / "stacks", "w") as file:
        monkeypatch.setattr(watchdog, "_STACKS", file.fileno())
        yield functools.partial(Run, clock, capsys)


@pytest.fixture
def run(make):
    """A run whose first loop has ended."""
    run = make()
    run.now = 5
    run.short_loop()
    return run


def test_stall_is_reported_once_with_the_stacks_and_its_end_is_reported_too(run, tmp_path):
    hangs, ended = threading.Event(), threading.Event()

    def hang():
        hangs.set()
        ended.wait()

    threading.Thread(target=hang).start()
    hangs.wait()
    with run.watchdog.around(6, None):
        run.check_after(STALL_SECONDS + 1)
        run.check_after(STALL_SECONDS)
        run.check_after(STALL_SECONDS)
    ended.set()
    stacks = (tmp_path / "stacks").read_text()
    assert 'watchdog_test.py", line' in stacks
    assert "in hang" in stacks and "in check_after" in stacks
    first, last = run.lines
    assert first == (
        "No step has ended for 5 min 01 s, after step 6. The run keeps waiting; the stacks of all "
        "threads show for what:"
    )
    assert last == "Going on, after 15 min 01 s at step 6."
    assert [(name, step) for name, step, _ in run.events] == [("stall", 6)]
    assert run.events[0][2]["seconds"] == STALL_SECONDS + 1


def test_long_loop_whose_steps_end_is_no_stall(run):
    with run.watchdog.around(run.now, None):
        for _ in range(5):
            run.now += 1
            run.check_after(STALL_SECONDS)
    assert run.reads > 0
    assert run.lines == []


def test_step_that_ends_in_the_same_loop_ends_the_stall(run):
    with run.watchdog.around(run.now, None):
        run.check_after(STALL_SECONDS)
        run.now = 9
        run.check_after(1)
        assert run.lines[1] == "Going on, after 5 min 01 s at step 6."
        run.check_after(STALL_SECONDS)
        assert "after step 9" in run.lines[2]


def test_first_loop_may_take_ten_times_as_long(make):
    run = make()
    with run.watchdog.around(0, None):
        run.check_after(FIRST * STALL_SECONDS - 1)
        assert run.lines == []
        run.check_after(1)
        assert len(run.lines) == 1
    with run.watchdog.around(0, None):
        run.check_after(STALL_SECONDS)
    assert len(run.events) == 2


def test_loops_that_end_in_time_and_evaluating_and_saving_read_no_step(run):
    for _ in range(10):
        with run.watchdog.around(run.now, None):
            run.check_after(STALL_SECONDS - 1)
        run.check_after(100 * STALL_SECONDS)
    assert (run.lines, run.reads) == ([], 0)


def test_step_that_a_busy_device_does_not_return_is_read_by_one_thread_only(make, monkeypatch):
    monkeypatch.setattr(watchdog, "_READ_SECONDS", 0.01)
    run = make()
    run.short_loop()
    returned = threading.Event()
    run.read = lambda: returned.wait(60)
    with run.watchdog.around(run.now, None):
        for _ in range(5):
            run.check_after(STALL_SECONDS)
        reading = [t for t in threading.enumerate() if t.name == "ctl-watchdog-step"]
        assert len(reading) == 1
        returned.set()
    assert len(run.events) == 1


def test_step_that_cannot_be_read_counts_as_not_ended(run):
    run.read = lambda: 1 / 0
    with run.watchdog.around(run.now, None):
        run.check_after(STALL_SECONDS)
    assert len(run.events) == 1


def test_event_that_cannot_be_written_does_not_end_the_watch(run):
    def fail(*_, **__):
        raise OSError("No space left on device")

    run.record = fail
    for count in (2, 4):
        with run.watchdog.around(run.now, None):
            run.check_after(STALL_SECONDS)
        assert len(run.lines) == count


def test_loop_that_fails_does_not_go_on(run):
    with pytest.raises(KeyError), run.watchdog.around(run.now, None):
        run.check_after(STALL_SECONDS)
        raise KeyError
    assert len(run.lines) == 1


def has_thread():
    return any(thread.name == "ctl-watchdog" for thread in threading.enumerate())


def wait_for(condition, seconds=60):
    deadline = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < deadline, "waited too long"
        time.sleep(0.01)


def test_thread_checks_until_the_run_ends(make, clock):
    run = make(seconds=0.1)
    run.short_loop()
    with run.watchdog.around_training():
        assert has_thread()
        with run.watchdog.around(run.now, None):
            clock.now += 1
            wait_for(lambda: run.events)
    wait_for(lambda: not has_thread())
