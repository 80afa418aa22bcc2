"""Ends training after a time limit."""

from collections.abc import Callable, Mapping
import time
from typing import Any

from ctl.configs import durations
from ctl.loop.actions.action import Action


class TimeLimit(Action):
    """Requests a stop when a run has taken as long as `train.max_duration`.

        TimeLimit("8 hours")

    The time includes evaluations, checkpoints, and earlier processes of the run up to their last
    checkpoint. It is checked after each inner loop, by the clock of the chief.

    Args:
        duration: the limit, such as "8 hours" or "30 minutes".
        clock: returns the time, in seconds.

    Raises:
        UsageError: `duration` is not a time.
    """

    at = "train"

    def __init__(self, duration: str, *, clock: Callable[[], float] = time.monotonic):
        self._duration = duration
        self._limit = durations.seconds(duration)
        self._clock = clock
        self._since = clock()

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Checks the clock."""
        if self._seconds >= self._limit:
            self.request_stop(f"{durations.LIMIT}={self._duration} has passed")

    @property
    def _seconds(self) -> float:
        return self._clock() - self._since

    def get_state(self) -> dict[str, Any]:
        """Returns the seconds so far."""
        return {"seconds": self._seconds}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Adds the time of the earlier processes."""
        # The time never decreases: a rollback within a process restores an old checkpoint, but no time.
        self._since = min(self._since, self._clock() - state["seconds"])
