"""Memory and utilization of the GPUs, by a driver of the test's own."""

import importlib.util
import sys
import types

import pytest
import tensorflow as tf

from ctl.loop import controller
from ctl.loop.controller import Controller
from ctl.loop.gpu_usage import GpuUsage
from ctl.loop.progress import Progress
from tests import tiny

GIB = 2**30
NO_GPU = not tf.config.list_physical_devices("GPU")


class NVMLError(Exception):
    """What the driver's library raises."""


class Driver:
    """pynvml over GPUs of (used bytes, percent busy); None is what the driver does not tell."""

    NVMLError = NVMLError

    def __init__(self, gpus, *, installed=True):
        self.gpus = gpus
        self.installed = installed
        self.opened = 0

    def nvmlInit(self):
        if not self.installed:
            raise NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= len(self.gpus):
            raise NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return types.SimpleNamespace(used=self.told(self.gpus[gpu][0]))

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return types.SimpleNamespace(gpu=self.told(self.gpus[gpu][1]))

    def told(self, value):
        if value is None:
            raise NVMLError("Not Supported")
        return value


TWO = [(3 * GIB, 90), (5 * GIB, 20)]


@pytest.mark.parametrize(
    ("gpus", "visible", "usage"),
    [
        (TWO, None, {"gpu_memory_gib": 5.0, "gpu_utilization": 0.9}),
        (TWO, "0", {"gpu_memory_gib": 3.0, "gpu_utilization": 0.9}),
        (TWO, "1", {"gpu_memory_gib": 5.0, "gpu_utilization": 0.2}),
        (TWO, "GPU-1", {"gpu_memory_gib": 5.0, "gpu_utilization": 0.2}),
        (TWO, "-1", {}),
        (TWO, "7", {}),
        ([], None, {}),
        ([(0, 0)], None, {"gpu_memory_gib": 0.0, "gpu_utilization": 0.0}),
        ([(3 * GIB, None)], None, {"gpu_memory_gib": 3.0}),
        ([(None, 90)], None, {"gpu_utilization": 0.9}),
    ],
)
def test_usage_is_the_largest_of_the_gpus_that_the_process_may_see(
    monkeypatch, gpus, visible, usage
):
    monkeypatch.setitem(sys.modules, "pynvml", Driver(gpus))
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert GpuUsage(environment)() == usage


def test_no_package_and_no_driver_tell_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuUsage({})() == {}
    monkeypatch.setitem(sys.modules, "pynvml", Driver(TWO, installed=False))
    assert GpuUsage({})() == {}


def test_driver_is_opened_once_and_read_anew(monkeypatch):
    driver = Driver([(1 * GIB, 10)])
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    usage = GpuUsage({})
    assert usage() == {"gpu_memory_gib": 1.0, "gpu_utilization": 0.1}
    driver.gpus[0] = (2 * GIB, 10)
    assert usage() == {"gpu_memory_gib": 2.0, "gpu_utilization": 0.1}
    assert driver.opened == 1


def written(folder):
    """The names of the summaries in a folder."""
    return {
        value.tag
        for path in folder.glob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }


def test_usage_is_shown_and_summarized_beside_the_outputs(strategy, tmp_path):
    lines = []
    made = Controller(
        trainer=tiny.trainer(strategy(1), 7),
        steps_per_loop=5,
        summary_dir=str(tmp_path),
        progress=Progress(total=5, write=lines.append),
        gpu_usage=lambda: {"gpu_memory_gib": 5.0, "gpu_utilization": 0.9},
    )
    made.train(5)
    assert "| gpu_memory_gib 5.0000 | gpu_utilization 0.9000" in lines[0]
    assert {"loss", "gpu_memory_gib", "gpu_utilization"} <= written(tmp_path)
    assert set(made.outputs) == {"loss", "accuracy"}


def test_gpus_that_do_not_train_are_not_shown(strategy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Driver(TWO))
    lines = []
    Controller(
        trainer=tiny.trainer(strategy(1), 7),
        steps_per_loop=5,
        progress=Progress(total=5, write=lines.append),
    ).train(5)
    assert [("gpu" in line) for line in lines] == [not NO_GPU]


@pytest.mark.parametrize(
    ("devices", "on_gpu"),
    [
        (("/job:localhost/replica:0/task:0/device:GPU:0",), True),
        (("/job:localhost/replica:0/task:0/device:CPU:0",), False),
        (("/job:worker/replica:0/task:0/device:TPU:0",), False),
    ],
)
def test_gpus_train_where_a_replica_is_on_one(devices, on_gpu):
    extended = types.SimpleNamespace(worker_devices=devices)
    assert controller._on_gpu(types.SimpleNamespace(extended=extended)) == on_gpu


@pytest.mark.gpu
@pytest.mark.skipif(
    NO_GPU or not importlib.util.find_spec("pynvml"), reason="needs a GPU and nvidia-ml-py"
)
def test_a_real_gpu_tells_its_memory():
    tf.constant(1.0) + 1.0
    assert GpuUsage()()["gpu_memory_gib"] > 0
