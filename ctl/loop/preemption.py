"""Requests a stop by the notice of a cloud that it will preempt or stop this machine."""

from collections.abc import Iterator
import contextlib
import os
import threading
from typing import Any
import urllib.request

from ctl import errors
from ctl.errors import UsageError
from ctl.loop.actions.action import Action

_HOST = "metadata.google.internal"
# Seconds between two requests to the metadata server, and the limit of each. Compute Engine gives 30 s
# after the notice (https://cloud.google.com/compute/docs/instances/preemptible).
INTERVAL, _TIMEOUT = 5.0, 5.0
# The values that announce nothing, by Compute Engine's documentation of the metadata server. A
# migration to another host pauses the machine for less than a second, so training goes on.
_QUIET = {"preempted": ("FALSE",), "maintenance-event": ("NONE", "MIGRATE_ON_HOST_MAINTENANCE")}


class GceNotice(Action):
    """Requests a stop when Compute Engine announces that it will preempt or stop this machine."""

    at = "train"
    may_stop = False  # it uses the `StopRequest` of the run, with which the run is resumed later

    def __init__(self) -> None:
        self._host = os.environ.get("GCE_METADATA_HOST", _HOST)
        self._received = False

    @classmethod
    def from_config(cls, config: Any, workdir: Any) -> "GceNotice | None":
        """Makes the action of a config, if it requires one; see registry.py."""
        return cls() if config.train.preemption_notice == "gce" else None

    @contextlib.contextmanager
    def around_training(self) -> Iterator[None]:
        """Reads the notice once, and then from a thread, until the `with` block ends.

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
        ended = threading.Event()
        thread = threading.Thread(
            target=self._poll, args=(ended,), daemon=True, name="ctl-preemption"
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _poll(self, ended: threading.Event) -> None:
        while not self._received and not ended.wait(INTERVAL):
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
                self.controller.stop.request(notice=notice)
                errors.print_line(f"{notice}: saving, then stopping.")
