"""Measures time: when something is due, how a process uses its time, and the speed of training."""

from collections.abc import Iterator
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

from ctl.configs import durations

if TYPE_CHECKING:  # it imports TensorFlow
    from ctl.hardware.collectives import ProcessGroup


@dataclasses.dataclass(frozen=True)
class Every:
    """When something is repeated: at multiples of a number of steps, after some seconds, or at steps.

        Every(steps=500, seconds=1800.0)
        Every.of("30 minutes")

    Attributes:
        steps: steps between two times; 0 for no multiples.
        seconds: seconds between two times, in addition; 0 for no limit.
        at: further steps.
    """

    steps: int = 0
    seconds: float = 0.0
    at: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: "int | str | Every") -> "Every":
        """Returns the interval that a number of steps or a time, such as "30 minutes", describes."""
        return value if isinstance(value, Every) else cls(*durations.split_interval(value))

    def next(self, step: int) -> float:
        """Returns the first of its steps after a step; infinity if there is none."""
        multiples = [(step // self.steps + 1) * self.steps] if self.steps else []
        return min([*multiples, *(each for each in self.at if each > step)], default=float("inf"))


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

    Attributes:
        due: the result of the last `all_due`; False after `restart`.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Starts the next period."""
        self._since = time.monotonic()
        self.due = False

    def is_due(self) -> bool:
        """Returns whether the period is over by this process's clock; other clocks differ."""
        return bool(self._seconds) and time.monotonic() - self._since >= self._seconds

    def all_due(self, processes: "ProcessGroup") -> bool:
        """Returns whether the period is over by the chief's clock; collective, unless `seconds` is 0."""
        self.due = bool(self._seconds) and bool(processes.broadcast_from_chief(self.is_due()))
        return self.due


class WallClock:
    """Divides the time of a process among its activities.

        clock = WallClock()
        with clock.measure("steps"):
            train_a_little()
        clock.read()                            # {"total": 12.5, "steps": 3.2, ...}

    The time of a nested activity does not count for the outer one.

    Args:
        started: when the process started, by `time.monotonic`; now by default.
    """

    def __init__(self, *, started: float | None = None):
        self._started = time.monotonic() if started is None else started
        self._seconds: dict[str, float] = {}
        self._activity = ""  # the current one
        self._since = self._started

    def mark_started(self) -> None:
        """Counts the time since the process started as the activity "starting"."""
        self._switch("")
        self._seconds["starting"] = time.monotonic() - self._started

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
        seconds = {"total": time.monotonic() - self._started, **self._seconds}
        if compiling and "steps" in seconds:
            seconds |= {"steps": seconds["steps"] - compiling, "compiling": compiling}
        return seconds

    def _switch(self, activity: str) -> str:
        """Begins an activity, and returns the previous one."""
        now, before = time.monotonic(), self._activity
        if before:
            self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._activity, self._since = activity, now
        return before


class Throughput:
    """Measures the speed of inner loops.

    The first loop is excluded, since it traces and compiles; so is everything outside of the loops,
    such as evaluating and saving.

        throughput = Throughput(batch=64)
        throughput.add(100, seconds=0.5)
        throughput.examples_per_second                  # None: that was the first loop

    Args:
        batch: examples per step.

    Attributes:
        input_wait: the share of the last loop's time in which its steps waited for their batches;
            None if it is not measured.
        input_seconds: how long all loops waited for batches.
        last_seconds: the duration of the last loop, which may be the first.
        last_seconds_per_step: the duration of its steps; None before the second loop has ended.
    """

    def __init__(self, *, batch: int):
        self._batch = batch
        self._first: tuple[int, float] | None = None
        self._steps, self._seconds = 0, 0.0  # of all loops but the first
        self.last_seconds = 0.0
        self.last_seconds_per_step: float | None = None
        self.input_seconds = 0.0
        self.input_wait: float | None = None

    def add(self, steps: int, *, seconds: float) -> None:
        """Adds one loop."""
        self.last_seconds = seconds
        # Compiling takes seconds to minutes; a mean that included it would be wrong for hours.
        if self._first is None:
            self._first = (steps, seconds)
        else:
            self._steps += steps
            self._seconds += seconds
            self.last_seconds_per_step = seconds / steps

    def add_input_wait(self, seconds: float) -> None:
        """Adds the seconds that the steps of the last loop waited for their batches."""
        self.input_seconds += seconds
        self.input_wait = min(1.0, seconds / max(self.last_seconds, 1e-9))

    @property
    def examples_per_second(self) -> float | None:
        """The mean over all measured loops; None before the second loop has ended."""
        return self._steps * self._batch / self._seconds if self._steps else None

    @property
    def last_examples_per_second(self) -> float | None:
        """The speed of the last loop, since a mean hides a stall; None before the second loop."""
        return self._batch / self.last_seconds_per_step if self.last_seconds_per_step else None

    @property
    def compile_seconds(self) -> float:
        """The extra seconds of the first loop, compared with the speed of later loops."""
        steps, seconds = self._first or (0, 0.0)
        return max(0.0, seconds - (self.seconds_for(steps) or 0.0))

    def seconds_for(self, steps: int) -> float | None:
        """Returns the time that `steps` more steps will take at this speed; None if not known yet."""
        return self._seconds / self._steps * steps if self._steps else None
