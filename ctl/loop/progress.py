"""What a person sees while a run goes on. Loads no TensorFlow."""

from collections.abc import Callable, Mapping
import time
from typing import Any

from ctl.errors import print_line


class Progress:
    """Prints a line every few seconds of training, and one for each evaluation.

    progress = Progress(total=1000)
    progress.trained(100, {"loss": 0.3}, examples_per_second=9000.0, seconds_left=12.0)
    """

    def __init__(
        self,
        *,
        total: int,
        every: float = 5.0,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Takes what it prints about.

        Args:
            total: the step that training ends at.
            every: seconds between two lines of training.
            write: where lines go; standard output if not given.
            clock: gives the time, in seconds.
        """
        self._total = total
        self._every = every
        self._write = write or print_line
        self._clock = clock
        self._last: float | None = None

    def print_line(self, line: str) -> None:
        """Prints a line of another's."""
        self._write(line)

    def trained(
        self,
        step: int,
        outputs: Mapping[str, Any],
        *,
        examples_per_second: float | None,
        seconds_left: float | None,
    ) -> None:
        """A loop has ended; the first, the last, and one every few seconds is worth a line."""
        now = self._clock()
        if self._last is not None and now - self._last < self._every and step < self._total:
            return
        self._last = now
        speed = f" | {examples_per_second:,.0f} examples/s" if examples_per_second else ""
        left = f" | {duration(seconds_left)} left" if seconds_left and step < self._total else ""
        self._write(f"train {step:>7}/{self._total} | {numbers(outputs)}{speed}{left}")

    def evaluated(self, step: int, outputs: Mapping[str, Any]) -> None:
        """An evaluation has ended."""
        self._write(f"eval  {step:>7}/{self._total} | {numbers(outputs)}")


def numbers(outputs: Mapping[str, Any]) -> str:
    """Names and values: counts as whole numbers, others with four places or four digits."""
    shown = []
    for name, value in outputs.items():
        if isinstance(value, Mapping):
            shown.append(numbers({f"{name}/{key}": inner for key, inner in value.items()}))
        else:
            shown.append(f"{name} {_number(value)}")
    return " | ".join(shown)


def _number(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"
    return str(value)


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 3 min 05 s, 2 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
