"""Requests to save and stop a run, by a signal or by the notice of a cloud.

TensorFlow's own handlers of preemptions are not used: `PreemptionCheckpointHandler` must run the
training function and own the checkpoints, and `PreemptionWatcher` works inside Google only.
"""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any
import urllib.request

from ctl import errors
from ctl.errors import UsageError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HOST = "metadata.google.internal"
# Seconds between two requests to the metadata server, and the limit of each. Compute Engine gives 30 s
# after the notice (https://cloud.google.com/compute/docs/instances/preemptible).
INTERVAL, _TIMEOUT = 5.0, 5.0
# The values that announce nothing, by Compute Engine's documentation of the metadata server. A
# migration to another host pauses the machine for less than a second, so training goes on.
_QUIET = {"preempted": ("FALSE",), "maintenance-event": ("NONE", "MIGRATE_ON_HOST_MAINTENANCE")}


class StopRequest:
    """A request to save and stop, which the controller checks at the end of each inner loop.

        stop = StopRequest()
        stop.request(notice="the machine is about to be preempted")
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


class StopOnSignal(StopRequest):
    """Takes the first SIGINT or SIGTERM as a request; a second one ends the process immediately.

        with StopOnSignal() as stop:
            while not stop.requested:
                train_a_little()

    In a thread other than the main one, in which Ray runs functions, signals are left as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopOnSignal":
        # Python allows only the main thread to set handlers.
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
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
            signal.signal(other, signal.SIG_DFL)
        # The signal may interrupt another print: the stream then rejects this one.
        with contextlib.suppress(RuntimeError):
            errors.print_line(f"{name}: saving, then stopping; once more to stop immediately.")


class GceNotice:
    """Requests a stop when Compute Engine announces that it will preempt or stop this machine.

        with StopOnSignal() as stop, GceNotice(stop):
            while not stop.requested:
                train_a_little()

    Args:
        stop: the request to make, with the reason `notice`.
    """

    def __init__(self, stop: StopRequest):
        self._stop = stop
        self._host = os.environ.get("GCE_METADATA_HOST", _HOST)
        self._received = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True, name="ctl-preemption")

    def __enter__(self) -> "GceNotice":
        """Reads the notice once, and then from a thread.

        Raises:
            UsageError: no metadata server answers.
        """
        try:
            self._read()
        except OSError as error:
            raise UsageError(
                f"train.preemption_notice is gce, but no metadata server answers at {self._host} "
                f"({error}): train on Google Cloud, or set it to none."
            ) from None
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._received and not self._ended.wait(INTERVAL):
            with contextlib.suppress(OSError):  # the server may be unavailable for a moment
                self._read()

    def _read(self) -> None:
        for name, quiet in _QUIET.items():
            url = f"http://{self._host}/computeMetadata/v1/instance/{name}"
            request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                value = response.read(200).decode(errors="replace").strip()
            if value not in quiet and not self._received:
                self._received = True
                notice = f"{name}: {value}"
                self._stop.request(notice=notice)
                errors.print_line(f"{notice}: saving, then stopping.")
