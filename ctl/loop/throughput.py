"""How fast a run trains, without what is not training. Loads no TensorFlow."""


class Throughput:
    """Measures inner loops; the first, which traces and compiles, does not count.

    speed = Speed(batch=64)
    speed.add(100, seconds=0.5)
    speed.examples_per_second                       # None: that was the first
    """

    def __init__(self, *, batch: int):
        """Takes the examples of a step."""
        self._batch = batch
        self._loops = 0
        self._steps = 0
        self._seconds = 0.0

    def add(self, steps: int, *, seconds: float) -> None:
        """Counts a loop."""
        self._loops += 1
        if self._loops > 1:
            self._steps += steps
            self._seconds += seconds

    @property
    def examples_per_second(self) -> float | None:
        """Over all loops that count; None where there is none yet."""
        return self._steps * self._batch / self._seconds if self._steps else None

    def seconds_for(self, steps: int) -> float | None:
        """How long so many steps will take."""
        return self._seconds / self._steps * steps if self._steps else None
