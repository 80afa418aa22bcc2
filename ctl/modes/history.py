"""Collects the measurements of a `ctl.Run` as lists of equal length."""

from collections.abc import Callable, Mapping
import math
from typing import Any

from ctl.loop.actions.action import Action


class History:
    """A table with one row per step at which a loop or an evaluation has ended.

    history = History()
    actions = history.make_actions(lambda: 0.1)
    ...
    history.columns()               # {"step": [5, 10], "loss": [...], "eval/loss": [nan, ...]}
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, float]] = {}

    def make_actions(self, read_rate: Callable[[], float]) -> list[Action]:
        """Makes the actions that add rows.

        Args:
            read_rate: returns the learning rate, which is added to the rows of training.
        """
        return [_Recorder(self, "train", read_rate), _Recorder(self, "eval")]

    def add(self, step: int, prefix: str, outputs: Mapping[str, Any]) -> None:
        """Adds numbers to the row of a step; a repeated step replaces them.

        Args:
            step: the global step.
            prefix: the prefix of the names, "" or "eval/".
            outputs: numbers by name, maybe nested.
        """
        for name, value in outputs.items():
            if isinstance(value, Mapping):
                self.add(step, f"{prefix}{name}/", value)
            elif isinstance(value, int | float):
                self._rows.setdefault(step, {})[prefix + name] = value

    def columns(self) -> dict[str, list[float]]:
        """Returns name -> one value per row, NaN where there is none; `step` is the first name."""
        rows = [{"step": step, **self._rows[step]} for step in sorted(self._rows)]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name, math.nan) for row in rows] for name in names}


class _Recorder(Action):
    may_stop = False

    def __init__(self, history: History, at: str, read_rate: Callable[[], float] | None = None):
        self._history = history
        self._read_rate = read_rate
        self.at = at

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        prefix = "eval/" if self.at == "eval" else ""
        rate = {"learning_rate": self._read_rate()} if self._read_rate else {}
        self._history.add(self.controller.step, prefix, {**outputs, **rate})
