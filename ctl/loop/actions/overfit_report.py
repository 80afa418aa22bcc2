"""Reports whether a run on a few batches has learned them."""

from collections.abc import Mapping
from typing import Any

from ctl.loop.actions.action import Action
from ctl.loop.actions.monitored_metric import MonitoredMetric
from ctl.loop.progress import format_numbers

MEMORIZED = 0.1  # of the first loss: a model that has memorized a few batches is far below


class OverfitReport(Action):
    """Compares the losses of the first and the last evaluation, on the same examples.

    Args:
        batches: the number of global batches that the run trains on.
    """

    everywhere = True
    may_stop = False

    def __init__(self, batches: int):
        self._batches = batches
        self._metric = MonitoredMetric("eval/loss", "min")
        self._first: dict[str, Any] = {}
        self._last: dict[str, Any] = {}

    def check(self, evaluator: Any) -> None:
        """Checks that the run evaluates a loss."""
        self._metric.check(evaluator)

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Records the loss of an evaluation."""
        self._last = {"step": self.controller.step, "loss": self._metric.read(outputs)}
        self._first = self._first or self._last

    def end(self) -> None:
        """Prints the result in one line."""
        if self._last:
            self.controller.reporter.print_line(self._describe())

    def result(self) -> dict[str, Any]:
        """Returns the first and last loss, and whether the loss went down."""
        if not self._last:
            return {}
        down = self._metric.is_better(self._last["loss"], self._first["loss"])
        entry = {"batches": self._batches, "first": self._first, "last": self._last, "down": down}
        return {"overfit": entry}

    def get_state(self) -> dict[str, Any]:
        """Returns the first loss."""
        return self._first

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the first loss of the run."""
        self._first = dict(state)

    def _describe(self) -> str:
        first, last = self._first["loss"], self._last["loss"]
        if not self._metric.is_better(last, first):
            verdict = "did not go down: check the loss, the learning rate and the gradients"
        elif last < MEMORIZED * first:
            verdict = "went down: the model can learn these examples"
        else:
            verdict = (
                "went down, but not below a tenth: train longer, or with a higher learning rate"
            )
        batches = f"{self._batches} batch{'es' * (self._batches > 1)}"
        change = f"{format_numbers({'loss': first})} at step {self._first['step']} -> "
        change += f"{format_numbers({'loss': last})} at step {self._last['step']}"
        return f"Overfitting {batches}: {change}; it {verdict}."
