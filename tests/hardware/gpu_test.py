"""How much of the GPUs' memory TensorFlow takes, and which GPUs a process may see."""

import pytest
import tensorflow as tf

import ctl
from ctl.errors import UsageError
from ctl.hardware import gpu
from ctl.modes import experiment

NO_GPU = not tf.config.list_physical_devices("GPU")
on_cpu = pytest.mark.skipif(not NO_GPU, reason="is about a machine without a GPU")


class Gpus:
    """A machine with GPUs: what was set of each."""

    def __init__(self, monkeypatch, count, error=None):
        self.growth, self.limits = {}, {}
        self.error = error
        devices = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(count)
        ]
        monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: devices)
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", self.grow)
        monkeypatch.setattr(tf.config, "set_logical_device_configuration", self.limit)

    def grow(self, device, enable):
        if self.error:
            raise self.error
        self.growth[device.name[-5:]] = enable

    def limit(self, device, parts):
        if self.error:
            raise self.error
        self.limits[device.name[-5:]] = [part.memory_limit for part in parts]


@pytest.mark.parametrize(
    ("options", "growth", "limits"),
    [
        (dict(growth=False, limit_mib=0), {}, {}),
        (dict(growth=True, limit_mib=0), {"GPU:0": True, "GPU:1": True}, {}),
        (dict(growth=False, limit_mib=512), {}, {"GPU:0": [512], "GPU:1": [512]}),
    ],
)
def test_memory_of_every_gpu_is_set(monkeypatch, options, growth, limits):
    machine = Gpus(monkeypatch, 2)
    gpu.set_memory(**options)
    assert (machine.growth, machine.limits) == (growth, limits)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            dict(growth=True, limit_mib=0),
            "runtime.gpu.memory_growth has no effect: there is no GPU here. Set it to false.",
        ),
        (
            dict(growth=False, limit_mib=512),
            "runtime.gpu.memory_limit_mib has no effect: there is no GPU here. Set it to 0.",
        ),
    ],
)
def test_memory_of_no_gpu_is_refused(monkeypatch, options, line):
    Gpus(monkeypatch, 0)
    with pytest.raises(UsageError) as refused:
        gpu.set_memory(**options)
    assert str(refused.value) == line


@pytest.mark.parametrize("error", [RuntimeError("initialized"), ValueError("virtual devices")])
@pytest.mark.parametrize(
    ("options", "key"),
    [
        (dict(growth=True, limit_mib=0), "memory_growth"),
        (dict(growth=False, limit_mib=512), "memory_limit_mib"),
    ],
)
def test_setting_it_too_late_is_told(monkeypatch, error, options, key):
    Gpus(monkeypatch, 1, error)
    with pytest.raises(UsageError, match=rf"runtime\.gpu\.{key} comes too late: TensorFlow has"):
        gpu.set_memory(**options)


def test_growth_that_the_environment_forbids_is_told(monkeypatch):
    machine = Gpus(monkeypatch, 1)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    with pytest.raises(UsageError, match="while TF_FORCE_GPU_ALLOW_GROWTH is false"):
        gpu.set_memory(growth=True, limit_mib=0)
    gpu.set_memory(growth=False, limit_mib=512)
    assert machine.limits == {"GPU:0": [512]}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("memory_growth", True, {"growth": True, "limit_mib": 0}),
        ("memory_limit_mib", 512, {"growth": False, "limit_mib": 512}),
    ],
)
def test_config_sets_it_before_the_strategy_is_built(monkeypatch, key, value, told):
    calls = []
    monkeypatch.setattr(gpu, "set_memory", lambda **options: calls.append(options))
    monkeypatch.setattr(experiment.strategies, "build", lambda *_, **__: calls.append("strategy"))
    experiment._hardware(ctl.config(runtime=dict(gpu={key: value})).runtime)
    assert calls == [told, "strategy"]


@on_cpu
def test_config_that_sets_it_is_refused_on_a_machine_without_a_gpu():
    runtime = ctl.config(runtime=dict(gpu=dict(memory_growth=True))).runtime
    with pytest.raises(UsageError, match="there is no GPU here"):
        experiment._hardware(runtime)


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("2, 0", ["2", "0"]),
        ("1,-1,0", ["1"]),
        ("GPU-8f3c,MIG-1a", ["GPU-8f3c", "MIG-1a"]),
    ],
)
def test_gpus_that_cuda_leaves_to_a_process(variable, found):
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert gpu.visible_gpus(environment) == found
