"""Histograms of the weights, and the graph of the inner loop, for TensorBoard."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ctl.built.flops import list_graphs
from ctl.keras.variables import variables_of
from ctl.loop.actions.action import LoopAction

if TYPE_CHECKING:
    from ctl.loop.workdir import Workdir


class WeightHistograms(LoopAction):
    """Writes the weights after the first inner loop that reaches each multiple of `interval`.

    Args:
        interval: steps between two histograms of a weight.
    """

    def __init__(self, interval: int):
        self._interval = interval
        self._written = 0  # the last multiple that was written

    @classmethod
    def from_config(cls, config: Any, workdir: "Workdir") -> "WeightHistograms":
        """Makes the action of a config; see registry.py."""
        return cls(config.summaries.histogram_interval)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues after the last multiple that was written."""
        self._written = state["written"]

    def get_state(self) -> dict[str, Any]:
        """Returns the last multiple that was written."""
        return {"written": self._written}

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Writes the weights, if they are due."""
        multiple = self.controller.step // self._interval
        if multiple > self._written:
            self._written = multiple
            for weight in variables_of(self.controller.trainer.model):
                tf.summary.histogram(f"weights/{weight.name.removesuffix(':0')}", weight)


class GraphSummary(LoopAction):
    """Writes the graph of the inner loop once, after the first loop of a process."""

    def __init__(self) -> None:
        self._is_written = False

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Writes the graph."""
        graphs = [] if self._is_written else list_graphs(self.controller.trainer)
        if graphs:
            self._is_written = True
            tf.summary.graph(graphs[-1])
