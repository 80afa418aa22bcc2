"""Devices are validated, split and limited before TensorFlow uses them."""

import sys

import pytest
import tensorflow as tf

from ctl.errors import UsageError
from ctl.hardware import device_memory, devices, selection
from tests.support.fake_nvml import FakeGpu, FakeNvml

NO_GPU = not tf.config.list_physical_devices("GPU")
on_cpu = pytest.mark.skipif(not NO_GPU, reason="is about a machine without a GPU")
MIB = 2**20


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["gpu:0"], "'gpu:0': use names such as \"GPU:0\""),
        ([0], '0: use names such as "GPU:0"'),
        (["GPU:0", "GPU:0"], "a device twice"),
        (["GPU:0", "CPU:0"], "both CPUs and GPUs"),
    ],
)
def test_names_are_those_of_different_devices_of_one_kind(names, words):
    devices.check_names(["GPU:2", "GPU:0"])
    with pytest.raises(UsageError, match=f"runtime.devices contains {words}"):
        devices.check_names(names)


@on_cpu
def test_a_device_that_the_machine_does_not_have_is_rejected():
    with pytest.raises(UsageError, match=r"runtime\.devices .*'GPU:0'.*no GPU"):
        selection.select_devices(["GPU:0"], split=0, strategy="auto")
    with pytest.raises(UsageError, match=r"runtime\.devices contains 'CPU:9': did you mean CPU:"):
        selection.select_devices(["CPU:9"], split=0, strategy="one_device")


@on_cpu
def test_configured_devices_are_selected_in_their_order():
    selected = selection.select_devices(["CPU:2", "CPU:1"], split=0, strategy="mirrored")
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


def install_gpus(monkeypatch, gpus, details, **options):
    """Replaces the driver's GPUs, as names and MiB, and the names that TensorFlow reports."""
    fakes = [
        FakeGpu(total=size and size * MIB, name=name, uuid=uuid)
        for (name, size), uuid in zip(gpus, ("GPU-a", "GPU-b", "GPU-c", "MIG-d"), strict=False)
    ]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(fakes, **options))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def read_details(device):
        return {"device_name": details[int(device.name[-1])]}

    monkeypatch.setattr(tf.config.experimental, "get_device_details", read_details)


@pytest.mark.parametrize(
    ("gpus", "driver"),
    [([("A", 100)], False), ([("A", None)], True), ([], True), ([("B", 100)], True)],
    ids=["no driver", "memory not reported", "no GPU", "another GPU"],
)
def test_splitting_a_gpu_of_unknown_memory_is_rejected(monkeypatch, gpus, driver):
    install_gpus(monkeypatch, gpus, ["A"], driver=driver)
    with pytest.raises(UsageError, match=r"runtime\.logical_devices to 0"):
        device_memory.split(physical_gpu(0), 2, "runtime.logical_devices is 2")


@pytest.mark.parametrize(
    ("visible", "product", "limit"),
    [
        (None, "A", 45),
        (None, "C", 900),
        # By default CUDA numbers the fastest GPU 0, and the driver numbers them by their place.
        ("0", "C", 900),
        ("2,0", "A", 45),
        ("GPU-b,GPU-c", "C", 900),
        ("MIG-d,GPU-a", "A MIG", 135),
    ],
)
def test_parts_of_a_gpu_share_nine_tenths_of_its_memory(monkeypatch, visible, product, limit):
    install_gpus(monkeypatch, [("A", 100), ("B", 1000), ("C", 2000), ("A MIG", 300)], [product])
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    split = {}
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", split.__setitem__)
    device_memory.split(physical_gpu(0), 2, "runtime.logical_devices is 2")
    assert [part.memory_limit for part in split[physical_gpu(0)]] == [limit] * 2


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
    install_gpus(monkeypatch, [("A", 80_000), ("B", 10_000)], ["A", "B"])

    def read(device):
        limits = parts.get(int(device.name[-1]), [])
        return [tf.config.LogicalDeviceConfiguration(memory_limit=limit) for limit in limits]

    monkeypatch.setattr(tf.config, "get_logical_device_configuration", read)
    limits = [device_memory.gpu_memory_limit(f"GPU:{i}") for i in range(len(expected))]
    assert limits == [limit * MIB for limit in expected]


def test_other_devices_have_no_known_memory_limit(monkeypatch):
    assert device_memory.gpu_memory_limit("CPU:0") is None
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: None)
    install_gpus(monkeypatch, [("A", None)], ["A"])
    assert device_memory.gpu_memory_limit("GPU:0") is None
