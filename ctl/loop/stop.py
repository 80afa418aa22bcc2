"""Requests to save and stop a run, such as by a signal.

TensorFlow's own handlers of preemptions are not used: `PreemptionCheckpointHandler` must run the
training function and own the checkpoints, and `PreemptionWatcher` works inside Google only.
"""

import contextlib
import signal
import threading
from types import FrameType
from typing import Any

from ctl import errors

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """A request to save and stop, which the controller checks at the end of each inner loop.

        stop = StopRequest()
        stop.request(signal="SIGTERM")
        stop.requested                                  # True

    Attributes:
        reasons: the reasons for the stop, for the record of the run; {} without a request.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop. Another process of the run may not have been."""
        return bool(self.reasons)

    def request(self, **reason: str) -> None:
        """Requests a stop, such as from a signal handler or a thread."""
        # One assignment, so that a thread and a signal handler need no lock: a handler that waits for
        # a lock of the code that it interrupts never returns.
        self.reasons = {**self.reasons, **reason}

    def withdraw(self) -> None:
        """Withdraws the request, as at the start of another call of `ctl.Run`."""
        self.reasons = {}


class StopOnSignal(StopRequest):
    """Takes the first SIGINT, SIGTERM or SIGHUP as a request; a second one ends the process immediately.

        with StopOnSignal() as stop:
            while not stop.requested:
                train_a_little()

    SIGHUP, of a terminal that is closed, may arrive twice: it never ends the process, and `nohup` makes
    the process ignore it. In a thread other than the main one, in which Ray runs functions, signals are
    left as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopOnSignal":
        # Python allows only the main thread to set handlers.
        is_main = threading.current_thread() is threading.main_thread()
        ignored = {n for n in SIGNALS if signal.getsignal(n) == signal.SIG_IGN} & {signal.SIGHUP}
        numbers = [number for number in SIGNALS if is_main and number not in ignored]
        self._previous = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self.request(signal=name)
        # A step may hang, or a checkpoint take minutes: the user must be able to end the process.
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN if other == signal.SIGHUP else signal.SIG_DFL)
        # The signal may interrupt another print: the stream then rejects this one.
        with contextlib.suppress(RuntimeError):
            errors.print_line(f"{name}: saving, then stopping; once more to stop immediately.")
