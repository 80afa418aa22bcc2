"""Measures the floating-point operations of a step, and the share of the devices' peak."""

from typing import Any

from ctl.hardware.devices import peak_flops, replica_devices
from ctl.loop.actions.action import Action
from ctl.replica.step.flops import count_flops


class Utilization(Action):
    """Adds both to `result.json`, where they are known."""

    at = "train"
    may_stop = False

    def result(self) -> dict[str, Any]:
        """Returns the operations of a step, and the share of the peak."""
        controller = self.controller
        trainer, speed = controller.trainer, controller.reporter.throughput.examples_per_second
        flops = count_flops(trainer) if controller.is_chief else None
        measured: dict[str, Any] = {"flops_per_step": flops} if flops else {}
        dtype = trainer.compute_dtype.name
        peaks = [peak_flops(name, dtype) for name in replica_devices(trainer.strategy)]
        if flops and speed and all(peaks):
            steps_per_second = speed / trainer.global_batch_size
            peak = trainer.strategy.num_replicas_in_sync * min(peak for peak in peaks if peak)
            measured["model_flops_utilization"] = flops * steps_per_second / peak
        return measured
