"""Requests a stop when a cloud announces that it will stop this machine.

TensorFlow's own handlers are not used: `PreemptionCheckpointHandler` must run the training function
and own the checkpoints, and `PreemptionWatcher` works inside Google only.
"""

import contextlib
import os
import threading
import urllib.request

from ctl.errors import UsageError, print_line
from ctl.loop.stop import StopRequest

_HOST = "metadata.google.internal"
# Seconds between two requests, and the limit of each. Compute Engine gives 30 s after the notice
# (https://cloud.google.com/compute/docs/instances/preemptible).
_SECONDS = 5.0
# The values that announce nothing, by Compute Engine's documentation of the metadata server. A
# migration to another host pauses the machine for less than a second, so training goes on.
_QUIET = {"preempted": ("FALSE",), "maintenance-event": ("NONE", "MIGRATE_ON_HOST_MAINTENANCE")}


class GceNotice:
    """Requests a stop when Compute Engine announces that it will preempt or stop this machine.

        with StopOnSignal() as stop, GceNotice(stop):
            while not stop.requested:
                train_a_little()

    Args:
        stop: the request to make, with the reason `notice`.
        interval: seconds between two requests to the metadata server.
    """

    def __init__(self, stop: StopRequest, *, interval: float = _SECONDS):
        self._stop = stop
        self._interval = interval
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
        while not self._received and not self._ended.wait(self._interval):
            with contextlib.suppress(OSError):  # the server may be unavailable for a moment
                self._read()

    def _read(self) -> None:
        for name, quiet in _QUIET.items():
            url = f"http://{self._host}/computeMetadata/v1/instance/{name}"
            request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:
                value = response.read(200).decode(errors="replace").strip()
            if value not in quiet and not self._received:
                self._received = True
                notice = f"{name}: {value}"
                self._stop.request(notice=notice)
                print_line(f"{notice}: saving, then stopping.")
