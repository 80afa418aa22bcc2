"""Makes decisions by the clock, the same in all processes of a run."""

from collections.abc import Callable
import time

from ctl.hardware.collectives import ProcessGroup


class Timer:
    """A timer that is due when a number of seconds has passed since the last restart.

        timer = Timer(1800.0)
        while training:
            ...
            if timer.all_due(processes):
                evaluate()
                timer.restart()

    The first period starts when the object is made, so that a resumed run starts a new one.

    Args:
        seconds: the length of a period; 0 for a timer that is never due.
        clock: returns the time, in seconds.

    Attributes:
        due: the result of the last `all_due`; False after `restart`.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._clock = clock
        self._since = clock()
        self.due = False

    def is_due(self) -> bool:
        """Returns whether the period is over by this process's clock; other clocks differ."""
        return bool(self._seconds) and self._clock() - self._since >= self._seconds

    def all_due(self, processes: ProcessGroup) -> bool:
        """Returns whether the period is over by the chief's clock; collective, unless `seconds` is 0."""
        self.due = bool(self._seconds) and bool(processes.broadcast_from_chief(self.is_due()))
        return self.due

    def restart(self) -> None:
        """Starts the next period."""
        self._since = self._clock()
        self.due = False
