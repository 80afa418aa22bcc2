"""--mode=devices describes the hardware of a machine, and the strategy of a config on it."""

import pytest
import tensorflow as tf

import ctl
from ctl.hardware import gpu, tpu
from ctl.hardware.gpu import DriverGpu
from ctl.modes import devices

NO_GPU = not tf.config.list_physical_devices("GPU")
on_cpu = pytest.mark.skipif(not NO_GPU, reason="is about a machine without a GPU")
H200 = DriverGpu("NVIDIA H200", 143771, "550.54.15")
INSTALL = 'pip install "ctl-tensorflow[gpu]"'
CUDA = {"is_cuda_build": True, "cuda_compute_capabilities": ["sm_80", "sm_90"]}
SEEN = {"device_name": "NVIDIA H200", "compute_capability": (9, 0)}


VERSIONS = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}
FLAGS = {"TF_XLA_FLAGS": "--a --b", "XLA_FLAGS": "--c"}


@pytest.mark.parametrize(
    ("build", "environment", "line"),
    [
        (VERSIONS, {}, "CUDA 12.5.1, cuDNN 9, no XLA flags in the environment"),
        ({"is_cuda_build": False}, FLAGS, "without CUDA, TF_XLA_FLAGS=--a --b, XLA_FLAGS=--c"),
        ({"is_rocm_build": True}, {"XLA_FLAGS": ""}, "ROCm, no XLA flags in the environment"),
    ],
)
def test_tensorflow_is_described_by_its_build_and_the_flags_of_xla(build, environment, line):
    assert devices.describe_tensorflow("2.20.0", build, environment) == f"2.20.0, {line}"


def test_gpu_is_described_by_tensorflow_and_the_driver(monkeypatch):
    monkeypatch.setattr(gpu, "find_memory_mib", {"NVIDIA H200": 143771}.get)
    assert devices.describe_gpus([SEEN, {}], [H200], CUDA) == [
        ("GPU 0", "NVIDIA H200, memory 140.4 GiB, compute capability 9.0, driver 550.54.15"),
        ("GPU 1", "unknown name, memory unknown, compute capability unknown, driver 550.54.15"),
    ]
    assert devices.describe_gpus([{}], [], CUDA)[0][1].endswith(", driver unknown")
    assert devices.describe_gpus([], [], CUDA) == [("GPUs", "none")]


@pytest.mark.parametrize(
    ("build", "missing", "reason"),
    [
        ({"is_cuda_build": False}, [], f"this build does not support GPUs: {INSTALL}"),
        (CUDA, ["libcudnn.so.9"], f"it cannot load libcudnn.so.9: {INSTALL}"),
        (CUDA, [], "TF_CPP_MIN_LOG_LEVEL=0 prints the reason"),
    ],
)
def test_gpu_that_only_the_driver_reports_is_described(build, missing, reason, monkeypatch):
    monkeypatch.setattr(gpu, "find_missing_libraries", lambda _: missing)
    [(name, line)] = devices.describe_gpus([], [H200], build)
    assert name == "GPUs"
    assert line.endswith(f"the driver reports NVIDIA H200 (driver 550.54.15): {reason}")


@pytest.mark.parametrize(
    ("chips", "obstacle", "line"),
    [
        ([], "no TPU chip", "none: no TPU chip"),
        (["v5e"] * 4, None, "4 x v5e"),
        (["v5e"], "no libtpu", "1 x v5e, which cannot be used: no libtpu"),
    ],
)
def test_tpu_is_described_by_its_chips_and_the_obstacle_to_using_it(
    monkeypatch, chips, obstacle, line
):
    monkeypatch.setattr(tpu, "list_chips", lambda: chips)
    monkeypatch.setattr(tpu, "find_obstacle", lambda: obstacle)
    assert devices.describe_tpu() == line


ONE = "one_device (auto: no GPU), 1 replica"
ON_CPU = "off (auto: on CPUs "
TWO = "mirrored (auto: no GPU, CPU split into 2), 2 replicas"


@on_cpu
@pytest.mark.parametrize(
    ("runtime", "strategy", "xla"),
    [
        ({"logical_devices": 2}, TWO, ON_CPU),
        ({"strategy": "one_device"}, "one_device (no GPU), 1 replica", ON_CPU),
        ({"logical_shards": 4}, ONE, "off (auto: XLA fuses across logical shards)"),
        ({"xla": "step"}, ONE, "step (as configured)"),
        ({"tpu": "pod"}, "auto is not available: No TPU can be used: tensorflow-tpu is not", ""),
    ],
)
def test_strategy_and_xla_mode_of_a_config(runtime, strategy, xla):
    lines = devices.describe(ctl.config(runtime=runtime).runtime).splitlines()
    rows = dict(line.split("  ", 1) for line in lines)
    assert rows["strategy"].strip().startswith(strategy)
    assert rows.get("xla", "").strip().startswith(xla) and ("xla" in rows) == bool(xla)
    # A strategy that is not available does not hide the other rows.
    assert rows["engine"].strip() == "none: a run of one process"
    assert rows["TensorFlow"].startswith("2.")


def test_describing_a_gpu_does_not_allocate_its_memory(monkeypatch):
    grown = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda d, on: grown.append((d, on))
    )
    monkeypatch.setattr(devices.selection, "build", lambda *_, **__: list(grown))
    assert devices._build_hardware(ctl.config().runtime) == [("GPU:0", True)]
