"""The first signal is a wish, the second an order."""

import os
import signal
import subprocess

import pytest

from ctl.loop.stop import SIGNALS, StopOnSignal
from tests import child

TRAINING = """
import sys, time
from ctl.loop.stop import StopOnSignal

with StopOnSignal() as stop:
    print("started", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    if "patient" in sys.argv:
        time.sleep(60)
    print("saved", flush=True)
sys.exit(75)
"""
LINE = "{}: saving, then stopping; once more to stop at once."


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of this process, put back after a test that fails."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_sets_the_flag_and_says_so(number, capsys):
    with StopOnSignal() as stop:
        assert (stop.requested, stop.received) == (False, None)
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.received) == (True, number)
    assert capsys.readouterr().out == LINE.format(number.name) + "\n"


@pytest.mark.parametrize("signalled", [False, True])
def test_handlers_are_restored(signalled):
    calls = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: calls.append(number))
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopOnSignal():
        assert [signal.getsignal(number) for number in SIGNALS] != before
        if signalled:
            os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == [signal.SIGTERM]


def test_handlers_are_restored_after_an_error():
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(RuntimeError), StopOnSignal():
        raise RuntimeError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_nothing_is_caught_before_it_is_entered():
    before = [signal.getsignal(number) for number in SIGNALS]
    StopOnSignal()
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_signal_in_the_middle_of_a_line_sets_the_flag_all_the_same(monkeypatch):
    def reentrant(*_, **__):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    monkeypatch.setattr("builtins.print", reentrant)
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested


@pytest.mark.parametrize("number", SIGNALS)
def test_process_ends_as_it_wants_after_one_signal(number):
    with child.start(["-c", TRAINING]) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (75, f"{LINE.format(number.name)}\nsaved\n", "")


@pytest.mark.parametrize("second", SIGNALS)
def test_process_ends_at_once_after_a_second_signal(second):
    with child.start(["-c", TRAINING, "patient"]) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == LINE.format("SIGTERM") + "\n"
        process.send_signal(second)
        try:
            out, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert (process.returncode, out) == (-second, "")
