"""Devices are validated, split and limited before TensorFlow uses them."""

import sys

import pytest
import tensorflow as tf

from ctl.errors import UsageError
from ctl.hardware import devices
from tests.fake_nvml import FakeGpu, FakeNvml

NO_GPU = not tf.config.list_physical_devices("GPU")
on_cpu = pytest.mark.skipif(not NO_GPU, reason="is about a machine without a GPU")
MIB = 2**20
TRAINER = "tests.reference_model:ReferenceTrainer"


@pytest.mark.parametrize("names", [[], ["CPU:0"], ["GPU:0", "GPU:2"], ["GPU:2", "GPU:0"]])
def test_names_of_one_kind_of_device_are_accepted(names):
    devices.check_names(names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["gpu:0"], "runtime.devices contains 'gpu:0': use names such as \"GPU:0\"."),
        ([0], 'runtime.devices contains 0: use names such as "GPU:0".'),
        (["GPU:0", "GPU:0"], "runtime.devices contains a device twice: remove one of them."),
        (["GPU:0", "CPU:0"], "runtime.devices contains both CPUs and GPUs: use one kind."),
    ],
)
def test_other_names_are_rejected(names, message):
    with pytest.raises(UsageError) as error:
        devices.check_names(names)
    assert str(error.value) == message


@on_cpu
def test_a_device_that_the_machine_does_not_have_is_rejected():
    with pytest.raises(UsageError, match=r"runtime\.devices contains 'CPU:9': did you mean CPU:"):
        devices.select(["CPU:9"], split=0, strategy="one_device")


@on_cpu
def test_configured_devices_are_selected_in_their_order():
    selected = devices.select(["CPU:2", "CPU:1"], split=0, strategy="mirrored")
    assert selected == (["CPU:2", "CPU:1"], "CPU:2, CPU:1 as configured")


@on_cpu
def test_replicas_of_the_default_strategy_are_on_the_first_device():
    assert devices.replica_devices(tf.distribute.get_strategy()) == ["CPU:0"]
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert devices.replica_devices(strategy) == ["CPU:0", "CPU:1"]


def pretend_gpus(monkeypatch, count):
    """Lets TensorFlow list this many GPUs."""
    gpus = [physical_gpu(index) for index in range(count)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)


def physical_gpu(index):
    return tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU")


@pytest.mark.parametrize(
    "nvml",
    [FakeNvml(driver=False), FakeNvml([FakeGpu(total=None)]), FakeNvml()],
    ids=["no driver", "memory not reported", "no GPU"],
)
def test_splitting_a_gpu_of_unknown_memory_is_rejected(monkeypatch, nvml):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with pytest.raises(UsageError, match=r"does not report: set runtime\.logical_devices to 0"):
        devices._split(physical_gpu(0), 2)


@pytest.mark.parametrize(
    ("visible", "limit"), [(None, 450), ("0,2", 900), ("GPU-b,GPU-c", 900), ("MIG-d,GPU-a", 45)]
)
def test_parts_of_a_gpu_share_nine_tenths_of_its_memory(monkeypatch, visible, limit):
    sizes = {"GPU-a": 100, "GPU-b": 1000, "GPU-c": 2000, "MIG-d": 300}
    gpus = [FakeGpu(total=size * MIB, uuid=uuid) for uuid, size in sizes.items()]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    split = {}
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", split.__setitem__)
    devices._split(physical_gpu(1), 2)  # the second of those that the process may use
    assert [part.memory_limit for part in split[physical_gpu(1)]] == [limit] * 2


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # A limit of the config, a GPU that is split into two, and none: 9/10 of its memory.
        ({0: [512], 1: [1024]}, [512, 1024]),
        ({0: [100, 100], 1: [1024]}, [100, 100, 1024]),
        ({}, [72_000, 9_000]),
    ],
)
def test_the_memory_limit_of_a_gpu_is_that_of_its_logical_device(monkeypatch, parts, expected):
    pretend_gpus(monkeypatch, 2)
    gpus = [FakeGpu(total=size * MIB) for size in (80_000, 10_000)]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def read(device):
        limits = parts.get(int(device.name[-1]), [])
        return [tf.config.LogicalDeviceConfiguration(memory_limit=limit) for limit in limits]

    monkeypatch.setattr(tf.config, "get_logical_device_configuration", read)
    limits = [devices.gpu_memory_limit(f"GPU:{i}") for i in range(len(expected))]
    assert limits == [limit * MIB for limit in expected]


def test_other_devices_have_no_known_memory_limit(monkeypatch):
    assert devices.gpu_memory_limit("CPU:0") is None
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: None)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(total=None)]))
    assert devices.gpu_memory_limit("GPU:0") is None
