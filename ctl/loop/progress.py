"""Prints the progress of a run."""

from collections.abc import Callable, Mapping
import math
from typing import Any

from ctl.errors import print_line
from ctl.loop.timing import Throughput

EVERY = 1000  # steps between two lines of training, at most
_EPOCHS = 100  # lines of epochs, about, of a run that has more
_ROUNDING = 1e-6  # of multiples of an epoch
_SPEED_TOLERANCE = 0.2  # a larger relative difference from the mean is shown
_INPUT_TOLERANCE = 0.05  # a larger share of the time is shown


class Progress:
    """Prints a line of training and a line of the results for each evaluation.

        with Progress(total=1000) as progress:
            progress.trained(100, {"loss": 0.3}, throughput, last_step=1000)

    If a run does not evaluate while it trains, it prints lines for its first loop and for each epoch. No
    more than `EVERY` steps have one line, and the last step always has one.

    Args:
        total: the step at which training ends.
        steps_per_epoch: steps in which every training example is read once; None if not known.
        evaluates: whether the run evaluates while it trains.
        write: writes one line; by default to standard output.

    Attributes:
        durable: the step of the last checkpoint that is in the object store of the run; None if there
            is none.
    """

    def __init__(
        self,
        *,
        total: int,
        steps_per_epoch: float | None = None,
        evaluates: bool = False,
        write: Callable[[str], None] = print_line,
    ):
        self._total = total
        self._steps_per_epoch = steps_per_epoch
        self._write = write
        self._every, self._next = float(EVERY), math.inf if evaluates else 0.0
        if steps_per_epoch and not evaluates:
            epochs = max(1, math.ceil(total / steps_per_epoch / _EPOCHS))
            self._every = min(self._every, epochs * steps_per_epoch)
        self._held_back = ""  # the line of the last loop, if it was not printed
        self.durable: int | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what a subclass shows while the block runs."""

    def print_line(self, line: str) -> None:
        """Prints any other line."""
        self._write(line)

    def trained(
        self, step: int, outputs: Mapping[str, Any], speed: Throughput, *, last_step: int
    ) -> None:
        """Reports that a loop has ended.

        Args:
            step: the step at which it ended.
            outputs: its loss and metrics.
            speed: the speed of the loops. That of this loop is shown if it differs from the mean, and
                its wait for input if that is large.
            last_step: the step at which the training ends.
        """
        parts = [f"train {self._position(step)}"]
        if self._steps_per_epoch:
            parts.append(f"epoch {step / self._steps_per_epoch:.2f}")
        parts.append(format_numbers(outputs))
        mean, last = speed.examples_per_second, speed.last_examples_per_second
        if mean:
            # The mean of hours hides that the speed has just changed.
            differs = last and abs(last - mean) > _SPEED_TOLERANCE * mean
            last_loop = f" ({last:,.0f} in the last loop)" if differs else ""
            parts.append(f"{mean:,.0f} examples/s{last_loop}")
        if speed.input_wait and speed.input_wait > _INPUT_TOLERANCE:
            parts.append(f"waited {speed.input_wait:.0%} for input")
        if self.durable is not None:
            parts.append(f"durable {self.durable}")
        left = speed.seconds_for(last_step - step)
        if left and step < self._total:
            parts.append(f"{format_duration(left)} left")
        self._held_back = " | ".join(parts)
        # Boundaries are multiples, so that a resumed run has lines at the same steps.
        if step >= min(self._next, self._total, last_step):
            self._print_training()
        self._next = math.ceil(((step + _ROUNDING) // self._every + 1) * self._every - _ROUNDING)

    def evaluated(self, step: int, outputs: Mapping[str, Any]) -> None:
        """Reports that an evaluation has ended."""
        self._print_training()
        self._write(f"eval  {self._position(step)} | {format_numbers(outputs)}")

    def _print_training(self) -> None:
        if self._held_back:
            self._write(self._held_back)
        self._held_back = ""

    def _position(self, step: int) -> str:
        """Returns the step, and the last one of the run unless it has trained beyond it."""
        return f"{step:>7}" + f"/{self._total}" * (step <= self._total)


def format_numbers(outputs: Mapping[str, Any]) -> str:
    """Formats names and values; floats have four decimals, or four digits if they are small or large."""
    shown = []
    for name, value in outputs.items():
        if isinstance(value, Mapping):
            shown.append(format_numbers({f"{name}/{key}": item for key, item in value.items()}))
        else:
            shown.append(f"{name} {_format_number(value)}")
    return " | ".join(shown)


def _format_number(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):  # a count
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"
    return str(value)


def format_duration(seconds: float) -> str:
    """Formats a duration: "42 s", "3 min 05 s", "2 h 07 min"."""
    total = round(seconds)  # first, so that 59.6 s is not "60 s"
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"
