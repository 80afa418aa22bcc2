"""Replaces pynvml, and hence the NVIDIA driver, in tests."""

import dataclasses
import types


class NVMLError(Exception):
    """What pynvml raises."""


@dataclasses.dataclass
class FakeGpu:
    """A GPU as NVML reports it; None for what it does not support."""

    total: int | None = 80 * 2**30
    used: int | None = 0
    percent: int | None = 0
    name: str = "NVIDIA H200"
    uuid: str = ""
    is_lost: bool = False


class FakeNvml:
    """pynvml on a machine with some GPUs.

    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(), FakeGpu()]))
    """

    NVMLError = NVMLError

    def __init__(self, gpus=(), *, driver=True):
        self.gpus = list(gpus)
        self.driver = driver
        self.handles = []  # the indices that were looked up

    def nvmlInit(self):
        if not self.driver:
            raise NVMLError("NVML Shared Library Not Found")

    def nvmlSystemGetDriverVersion(self):
        return "550.54.15"

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= len(self.gpus):
            raise NVMLError("Invalid Argument")
        if self.gpus[index].is_lost:
            raise NVMLError("GPU is lost")
        self.handles.append(index)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        uuids = [gpu.uuid for gpu in self.gpus]
        if uuid not in uuids:
            raise NVMLError("Not Found")
        return self.nvmlDeviceGetHandleByIndex(uuids.index(uuid))

    def nvmlDeviceGetIndex(self, gpu):
        return next(index for index, each in enumerate(self.gpus) if each is gpu)

    def nvmlDeviceGetUUID(self, gpu):
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu):
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return types.SimpleNamespace(total=supported(gpu.total), used=supported(gpu.used))

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return types.SimpleNamespace(gpu=supported(gpu.percent))


def supported(value):
    if value is None:
        raise NVMLError("Not Supported")
    return value
