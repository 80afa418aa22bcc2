"""SIGINT and SIGTERM as a wish to stop, honoured between inner loops. Loads no TensorFlow."""

import contextlib
import signal
from types import FrameType
from typing import Any

from ctl import errors

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal:
    """Catches the first SIGINT or SIGTERM; a second one ends the process at once.

    with StopOnSignal() as stop:
        while not stop.requested:
            train_a_little()
    """

    def __init__(self) -> None:
        """Catches nothing yet: that begins with the `with` block."""
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    def __enter__(self) -> "StopOnSignal":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for other in SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        with contextlib.suppress(RuntimeError):  # it came in the middle of another line
            errors.print_line(
                f"{self.received.name}: saving, then stopping; once more to stop at once."
            )

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
