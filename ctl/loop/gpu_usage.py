"""Memory and utilization of the GPUs, as NVIDIA's driver tells them. Loads no TensorFlow.

Memory is what the process has taken of the GPU, by default nearly all of it from the start; with
runtime.gpu.memory_growth it is what the run needed.
"""

from collections.abc import Mapping
import importlib
import logging
import os
from typing import Any

from ctl.hardware import gpu

_GIB = 2**30
_LOG = logging.getLogger("ctl")


class GpuUsage:
    """Reads what the fullest and the busiest GPU come to.

    usage = GpuUsage()
    usage()         # {"gpu_memory_gib": 12.3, "gpu_utilization": 0.97}
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        """Opens nothing yet.

        Args:
            environment: the variables of this process, which say what GPUs it may see.
        """
        self._environment = environment
        self._opened: tuple[Any, list[Any]] | None = None

    def __call__(self) -> dict[str, float]:
        """The numbers of now.

        Returns:
            The most memory in use of a GPU in GiB, and the largest share of the time that one was
            busy; what the driver does not tell is left out, and all of it where there is no GPU or
            no nvidia-ml-py.
        """
        if self._opened is None:
            self._opened = _open(self._environment)
        nvml, gpus = self._opened
        read = {
            "gpu_memory_gib": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _GIB,
            "gpu_utilization": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        }
        found = {}
        for name, of in read.items():
            try:
                values = [of(gpu) for gpu in gpus]
            except nvml.NVMLError as error:  # a part of a GPU (MIG) tells no utilization
                _LOG.debug("No %s: %s", name, error)
                continue
            if values:
                found[name] = max(values)
        return found


def _open(environment: Mapping[str, str]) -> tuple[Any, list[Any]]:
    """The driver's library, and its handles of the GPUs that this process may see."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, []
    try:
        nvml.nvmlInit()
        names = gpu.visible_gpus(environment)
        if names is None:
            names = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
        return nvml, [_handle(nvml, name) for name in names]
    except nvml.NVMLError as error:  # no driver here, or a GPU that it does not know
        _LOG.debug("No GPU usage: %s", error)
        return nvml, []


def _handle(nvml: Any, name: str) -> Any:
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
