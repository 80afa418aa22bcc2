"""Measures the floating-point operations of a step, and the share of the devices' peak."""

from typing import Any

from ctl.built import flops
from ctl.loop.actions.action import Action


class Utilization(Action):
    """Adds both to `result.json`, where they are known."""

    at = "train"
    may_stop = False

    def result(self) -> dict[str, Any]:
        """Returns the operations of a step, and the share of the peak."""
        controller = self.controller
        speed = controller.reporter.throughput.examples_per_second
        return flops.measure(controller.trainer, speed) if controller.is_chief else {}
