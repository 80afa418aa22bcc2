"""The first signal requests a stop, the second ends the process."""

import os
import signal
import subprocess
import threading

import pytest

from ctl.loop.stop import SIGNALS, StopOnSignal
from tests.support import child

TRAINING = """
import signal
from ctl.loop.stop import StopOnSignal

with StopOnSignal():
    print("started", flush=True)
    while True:
        signal.pause()
"""
LINE = "{}: saving, then stopping; once more to stop immediately."


@pytest.fixture(autouse=True)
def handlers():
    """Restores the handlers of this process after a test that fails."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_requests_a_stop_and_prints_so(number, capsys):
    with StopOnSignal() as stop:
        assert (stop.requested, stop.reasons) == (False, {})
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.reasons) == (True, {"signal": number.name})
    assert capsys.readouterr().out == LINE.format(number.name) + "\n"


def test_thread_leaves_the_signals_as_they_are():
    # Ray runs functions in a thread, where Python does not allow handlers.
    before, seen = [signal.getsignal(number) for number in SIGNALS], []

    def train():
        with StopOnSignal() as stop:
            stop.request(signal="SIGTERM")
            stop.request(notice="preempted")
            seen.append((stop.reasons, [signal.getsignal(number) for number in SIGNALS]))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [({"signal": "SIGTERM", "notice": "preempted"}, before)]


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_handlers_are_installed_in_the_with_block_only_and_restored_also_after_an_error(number):
    calls = []
    for each in SIGNALS:
        signal.signal(each, lambda number, frame: calls.append(number))
    before, stop = [signal.getsignal(each) for each in SIGNALS], StopOnSignal()
    assert [signal.getsignal(each) for each in SIGNALS] == before
    with pytest.raises(RuntimeError), stop:
        assert [signal.getsignal(each) for each in SIGNALS] != before
        if number:
            os.kill(os.getpid(), number)
        raise RuntimeError
    assert [signal.getsignal(each) for each in SIGNALS] == before
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == [signal.SIGTERM]


def test_signal_in_the_middle_of_a_printed_line_requests_a_stop_too(monkeypatch):
    def reentrant(*_, **__):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    monkeypatch.setattr("builtins.print", reentrant)
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested


def test_second_signal_ends_the_process_immediately():
    with child.start(["-c", TRAINING]) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == LINE.format("SIGTERM") + "\n"
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert (process.returncode, out) == (-signal.SIGINT, "")


def test_second_hangup_does_not_end_a_process_that_saves():
    with StopOnSignal() as stop:
        for number in (signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert stop.reasons == {"signal": "SIGHUP"}


def test_hangup_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
