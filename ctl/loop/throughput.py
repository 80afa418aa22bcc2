"""Measures the examples per second of training."""


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
    """

    def __init__(self, *, batch: int):
        self._batch = batch
        self._loops = 0
        self._steps = 0
        self._seconds = 0.0
        self._first: tuple[int, float] = (0, 0.0)
        self._last: tuple[int, float] = (0, 0.0)
        self.last_seconds = 0.0
        self.input_seconds = 0.0
        self.input_wait: float | None = None

    def add(self, steps: int, *, seconds: float) -> None:
        """Adds one loop."""
        self._loops += 1
        self.last_seconds = seconds
        # Compiling takes seconds to minutes; a mean that included it would be wrong for hours.
        if self._loops > 1:
            self._steps += steps
            self._seconds += seconds
            self._last = (steps, seconds)
        else:
            self._first = (steps, seconds)

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
        steps, seconds = self._last
        return steps * self._batch / seconds if seconds else None

    @property
    def last_seconds_per_step(self) -> float | None:
        """The duration of a step in the last loop; None before the second loop has ended."""
        steps, seconds = self._last
        return seconds / steps if steps else None

    @property
    def compile_seconds(self) -> float:
        """The extra seconds of the first loop, compared with the speed of later loops."""
        steps, seconds = self._first
        return max(0.0, seconds - (self.seconds_for(steps) or 0.0))

    def seconds_for(self, steps: int) -> float | None:
        """Returns the time that `steps` more steps will take at this speed; None if not known yet."""
        return self._seconds / self._steps * steps if self._steps else None
