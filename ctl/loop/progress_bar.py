"""Shows a progress bar below the lines of a run."""

from collections.abc import Mapping
from typing import Any

import rich.console
import rich.progress

from ctl.loop.progress import Progress, format_duration, format_numbers

_MOST_NUMBERS = 3  # of a loop's outputs next to the bar


class ProgressBar(Progress):
    """Prints the same lines as `Progress`, and shows a bar below them in the `with` block.

        with ProgressBar(total=1000) as progress:
            progress.trained(100, {"loss": 0.3}, examples_per_second=9000.0, seconds_left=12.0)

    Args:
        console: the terminal.
        **arguments: arguments of `Progress`.
    """

    def __init__(self, *, console: rich.console.Console | None = None, **arguments: Any):
        super().__init__(write=self._print_above, **arguments)
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=30),
            rich.progress.TextColumn("{task.description}", markup=False),
            console=console,
            refresh_per_second=2,  # the terminal must not take time from the steps
            transient=True,
        )
        self._task = self._bar.add_task("", total=self._total, visible=False)

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def trained(self, step: int, outputs: Mapping[str, Any], **speed: Any) -> None:
        """Moves the bar, and prints a line when `Progress` would."""
        rate, left = speed["examples_per_second"], speed["seconds_left"]
        shown = [f"step {step:,}/{self._total:,}"]
        shown += [format_numbers(dict(list(outputs.items())[:_MOST_NUMBERS]))]
        shown += [f"{rate:,.0f} examples/s"] if rate else []
        shown += [f"{format_duration(left)} left"] if left else []
        self._bar.update(
            self._task, completed=step, visible=True, description=" | ".join(filter(None, shown))
        )
        super().trained(step, outputs, **speed)

    def _print_above(self, line: str) -> None:
        # Not wrapped: a line that is copied from the terminal must be one line.
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
