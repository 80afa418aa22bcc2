"""Prints the progress of a run in a terminal, above a bar."""

from collections.abc import Mapping
import contextlib
import functools
from typing import Any

from ctl.errors import print_line
from ctl.loop.progress import Progress, format_duration, format_numbers
from ctl.loop.timing import Throughput

_MOST_NUMBERS = 3  # of a loop's outputs next to the bar


class ProgressBar(Progress):
    """Prints the same lines as `Progress`, and shows a bar below them in the `with` block.

    Args:
        **arguments: arguments of `Progress`.
    """

    def __init__(self, **arguments: Any):
        import rich.console
        import rich.progress  # takes a tenth of a second, and few processes need it

        super().__init__(write=self._print_above, **arguments)
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=30),
            rich.progress.TextColumn("{task.description}", markup=False),
            console=rich.console.Console(),
            refresh_per_second=2,  # the terminal must not take time from the steps
            transient=True,
        )
        self._task = self._bar.add_task("", total=self._total, visible=False)

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self._bar.stop()

    def trained(
        self, step: int, outputs: Mapping[str, Any], speed: Throughput, *, last_step: int
    ) -> None:
        """Moves the bar, and prints a line where `Progress` would."""
        rate, left = speed.examples_per_second, speed.seconds_for(last_step - step)
        shown = [f"step {step:,}/{self._total:,}"]
        shown += [format_numbers(dict(list(outputs.items())[:_MOST_NUMBERS]))]
        shown += [f"{rate:,.0f} examples/s"] if rate else []
        shown += [f"{format_duration(left)} left"] if left else []
        description = " | ".join(filter(None, shown))
        self._bar.update(self._task, completed=step, visible=True, description=description)
        super().trained(step, outputs, speed, last_step=last_step)

    def _print_above(self, line: str) -> None:
        # Not wrapped: a line that is copied from the terminal must be one line.
        options: Any = {"markup": False, "highlight": False, "soft_wrap": True}
        print_line(line, functools.partial(self._bar.console.print, **options))
