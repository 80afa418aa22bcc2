"""Measures how a process uses its time."""

from collections.abc import Callable, Iterator
import contextlib
import time


class WallClock:
    """Divides the time of a process among its activities.

        clock = WallClock()
        with clock.measure("steps"):
            train_a_little()
        clock.read()                            # {"total": 12.5, "steps": 3.2, ...}

    The time of a nested activity does not count for the outer one.

    Args:
        started: when the process started, by `clock`; now by default.
        clock: returns the time, in seconds.
    """

    def __init__(
        self, *, started: float | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._clock = clock
        self._started = clock() if started is None else started
        self._seconds: dict[str, float] = {}
        self._activity = ""  # the current one
        self._since = self._started

    def mark_started(self) -> None:
        """Counts the time since the process started as the activity "starting"."""
        self._switch("")
        self._seconds["starting"] = self._clock() - self._started

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Counts the time of the `with` block."""
        outer = self._switch(activity)
        try:
            yield
        finally:
            self._switch(outer)

    def read(self, *, compiling: float = 0.0) -> dict[str, float]:
        """Returns the seconds of each activity, and "total".

        Args:
            compiling: how many seconds of "steps" were used to trace and compile.
        """
        self._switch(self._activity)
        seconds = {"total": self._clock() - self._started, **self._seconds}
        if compiling and "steps" in seconds:
            seconds |= {"steps": seconds["steps"] - compiling, "compiling": compiling}
        return seconds

    def _switch(self, activity: str) -> str:
        """Begins an activity, and returns the previous one."""
        now, before = self._clock(), self._activity
        if before:
            self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._activity, self._since = activity, now
        return before
