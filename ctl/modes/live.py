"""The curves and the last numbers of a run, in the cell of a notebook that trains it."""

from collections.abc import Callable, Mapping, Sequence
import html
import importlib.util
import math
import time
from typing import Any

from ctl.commands import report, run_files
from ctl.errors import UsageError

_SECONDS = 2.0  # between two updates


class LiveView:
    """Shows a figure of plotly and a table, and replaces both while a call trains.

    Args:
        history: returns the numbers of the run, as `ctl.Run.history`.

    Raises:
        UsageError: IPython or plotly is not installed.
    """

    def __init__(self, history: Callable[[], Mapping[str, Sequence]]):
        report.require_plotly("live=True")
        if importlib.util.find_spec("IPython") is None:
            raise UsageError("live=True requires IPython: use it in a notebook.")
        self._history = history
        self.begin()

    def begin(self) -> None:
        """Begins a new cell."""
        self._shown: list[Any] = []
        self._next = 0.0

    def update(self) -> None:
        """Shows the numbers of now, at most every two seconds and for a tenth of the time."""
        start = time.monotonic()
        if start < self._next:
            return
        from IPython import display

        history = self._history()
        bundles = [_figure(history)._repr_mimebundle_(), {"text/html": _table(history)}]
        if not self._shown:
            self._shown = [display.display(b, raw=True, display_id=True) for b in bundles]
        else:
            for shown, bundle in zip(self._shown, bundles, strict=True):
                shown.update(bundle, raw=True)
        end = time.monotonic()
        self._next = end + max(_SECONDS, 10 * (end - start))

    def end(self) -> None:
        """Shows the last numbers of a call that has trained."""
        self._next = 0.0
        if self._shown:
            self.update()


def _figure(history: Mapping[str, Sequence]) -> Any:
    """Returns the curves; the files of a run have its last numbers only when it saves."""
    records = []
    for name in [name for name in history if name != "step"]:
        split = "eval" if name.startswith("eval/") else "train"
        records += [
            {"split": split, "step": step, name.removeprefix("eval/"): value}
            for step, value in zip(history["step"], history[name], strict=True)
            if not math.isnan(value)
        ]
    return report.plot(run_files.RunFiles("", {}, records, [], {}))


def _table(history: Mapping[str, Sequence]) -> str:
    """Returns the last value of each column as a table."""
    last = {name: [v for v in values if not math.isnan(v)][-1] for name, values in history.items()}
    rows = (f"<tr><th>{html.escape(name)}</th><td>{v:.4g}</td></tr>" for name, v in last.items())
    return f"<table>{''.join(rows)}</table>"
