"""A cloud's notice that this machine is about to go, as a wish to stop. Loads no TensorFlow.

TensorFlow's own handlers are not used: `PreemptionCheckpointHandler` wants to run the training function
and to own the checkpoints, and `PreemptionWatcher` sees notices inside Google alone.
"""

import contextlib
import os
import threading
import urllib.request

from ctl.errors import UsageError, print_line

_HOST = "metadata.google.internal"
_SECONDS = 5.0  # between two questions, and for an answer; of a preemption 30 s are left
# What the metadata server says of each where nothing is to come, by Compute Engine's documentation.
_QUIET = {"preempted": ("FALSE",), "maintenance-event": ("NONE", "MIGRATE_ON_HOST_MAINTENANCE")}


class GceNotice:
    """Asks Compute Engine's metadata server whether this machine is to be preempted or shut down.

        with GceNotice() as notice:
            while not notice.received:
                train_a_little()

    A migration to another host goes unnoticed by what runs, and is no reason to stop.
    """

    def __init__(self, *, interval: float = _SECONDS):
        """Asks nothing yet.

        Args:
            interval: seconds between two questions.
        """
        self._interval = interval
        self._host = os.environ.get("GCE_METADATA_HOST", _HOST)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ctl-preemption")
        self.received: str | None = None

    def __enter__(self) -> "GceNotice":
        """Asks once, and goes on in a thread.

        Raises:
            UsageError: there is no metadata server.
        """
        try:
            self._ask()
        except OSError as error:
            raise UsageError(
                f"train.preemption_notice is gce, and no metadata server answers at {self._host} "
                f"({error}): train on Google Cloud, or set it to none."
            ) from None
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while self.received is None and not self._over.wait(self._interval):
            with contextlib.suppress(OSError):  # it is away for a moment now and then
                self._ask()

    def _ask(self) -> None:
        for name, quiet in _QUIET.items():
            url = f"http://{self._host}/computeMetadata/v1/instance/{name}"
            request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                value = answer.read(200).decode(errors="replace").strip()
            if value not in quiet:
                self.received = f"{name}: {value}"
                print_line(f"{self.received}: saving, then stopping.")
