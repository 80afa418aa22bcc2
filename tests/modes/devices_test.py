"""--mode=devices: what a machine has to train on, and what a config comes to on it."""

import subprocess

import pytest
import tensorflow as tf

import ctl
from ctl.hardware import tpu
from ctl.modes import devices

NO_GPU = not tf.config.list_physical_devices("GPU")
on_cpu = pytest.mark.skipif(not NO_GPU, reason="is about a machine without a GPU")
H200 = devices.DriverGpu("NVIDIA H200", "143771", "550.54.15")
SEEN = {"device_name": "NVIDIA H200", "compute_capability": (9, 0)}


@pytest.mark.parametrize(
    ("build", "environment", "line"),
    [
        (
            {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}, {},
            "2.20.0, CUDA 12.5.1, cuDNN 9, no XLA flags in the environment",
        ),
        (
            {"is_cuda_build": False}, {"TF_XLA_FLAGS": "--a --b", "XLA_FLAGS": "--c"},
            "2.20.0, without CUDA, TF_XLA_FLAGS=--a --b, XLA_FLAGS=--c",
        ),
        (
            {"is_rocm_build": True}, {"XLA_FLAGS": ""},
            "2.20.0, ROCm, no XLA flags in the environment",
        ),
    ],
)  # fmt: skip
def test_tensorflow_is_its_version_its_build_and_the_flags_of_xla(build, environment, line):
    assert devices.tensorflow("2.20.0", build, environment) == line


@pytest.mark.parametrize(
    ("details", "told", "rows"),
    [
        ([], [], [("GPUs", "none")]),
        (
            [SEEN], [H200],
            [("GPU 0", "NVIDIA H200, memory 140.4 GiB, compute capability 9.0, driver 550.54.15")],
        ),
        (
            [SEEN, SEEN], [H200, devices.DriverGpu("NVIDIA H200", "[N/A]", "550.54.15")],
            [
                ("GPU 0", "NVIDIA H200, memory 140.4 GiB, compute capability 9.0, driver 550.54.15"),
                ("GPU 1", "NVIDIA H200, memory unknown, compute capability 9.0, driver 550.54.15"),
            ],
        ),
        (
            [{**SEEN, "device_name": "NVIDIA H200 MIG 1g.18gb"}], [H200],
            [
                (
                    "GPU 0",
                    "NVIDIA H200 MIG 1g.18gb, memory unknown, compute capability 9.0, driver "
                    "550.54.15",
                )
            ],
        ),
        (
            [{}], [],
            [
                (
                    "GPU 0",
                    "of an unknown name, memory unknown, compute capability unknown, driver unknown",
                )
            ],
        ),
        (
            [SEEN], [H200, H200],
            [("GPU 0", "NVIDIA H200, memory unknown, compute capability 9.0, driver unknown")],
        ),
    ],
)  # fmt: skip
def test_gpu_is_what_tensorflow_and_the_driver_tell(details, told, rows):
    assert devices.gpus(details, told, cuda=True) == rows


@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        (
            False,
            "this build is not for GPUs; BUILD.md tells how to install the one that is",
        ),
        (True, "its libraries may be missing, which TF_CPP_MIN_LOG_LEVEL=0 tells"),
    ],
)
def test_gpu_that_tensorflow_does_not_see_is_told(cuda, why):
    line = f"none that TensorFlow sees, but NVIDIA H200 (driver 550.54.15): {why}"
    assert devices.gpus([], [H200], cuda=cuda) == [("GPUs", line)]


@pytest.mark.parametrize(
    ("visible", "which"), [(None, []), ("1,0", ["-i", "1,0"]), ("GPU-8f3c", ["-i", "GPU-8f3c"])]
)
def test_driver_is_asked_for_the_gpus_that_the_process_may_see(monkeypatch, visible, which):
    asked = []

    def smi(query, **_):
        asked.append(query[3:])
        out = "NVIDIA H200, 143771, 550.54.15\nnot a row\n"
        return subprocess.CompletedProcess(query, 0, stdout=out)

    monkeypatch.setattr(devices.subprocess, "run", smi)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (devices.driver_gpus(), asked) == ([H200], [which])


def test_no_driver_and_no_gpu_to_see_are_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.driver_gpus() == []
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: pytest.fail("it was asked"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert devices.driver_gpus() == []


@pytest.mark.parametrize(
    ("chips", "lack", "line"),
    [
        ([], "no TPU chip is on", "none: no TPU chip is on"),
        (["v5e"] * 4, None, "4 x v5e"),
        (
            ["v5e"],
            "libtpu is not installed",
            "1 x v5e, which cannot be used: libtpu is not installed",
        ),
    ],
)
def test_tpu_is_what_is_there_and_whether_it_can_be_used(monkeypatch, chips, lack, line):
    monkeypatch.setattr(tpu, "chips", lambda: chips)
    monkeypatch.setattr(tpu, "missing", lambda: lack)
    assert devices.tpus() == line


ON_CPU = "off (auto: on CPUs XLA makes small networks slower)"
SHARDS = "off (auto: XLA fuses across logical shards)"


@on_cpu
@pytest.mark.parametrize(
    ("runtime", "strategy", "xla"),
    [
        ({}, "one_device (auto: no GPU here), 1 replica", ON_CPU),
        (
            {"logical_devices": 2},
            "mirrored (auto: no GPU here, the CPU split in 2), 2 replicas", ON_CPU,
        ),
        ({"strategy": "one_device"}, "one_device (no GPU here), 1 replica", ON_CPU),
        ({"logical_shards": 4}, "one_device (auto: no GPU here), 1 replica", SHARDS),
        ({"xla": "step"}, "one_device (auto: no GPU here), 1 replica", "step (as configured)"),
        ({"tpu": {"name": "pod"}}, "tpu: a replica a core of a TPU slice", None),
    ],
)  # fmt: skip
def test_what_a_config_comes_to_here(runtime, strategy, xla):
    lines = devices.describe(ctl.config(runtime=runtime).runtime).splitlines()
    rows = dict(line.split("  ", 1) for line in lines)
    found = {name: text.strip() for name, text in rows.items()}
    assert found["strategy"] == strategy
    assert found.get("xla", "").partition(";")[0] == (xla or "")


@on_cpu
def test_strategy_that_cannot_be_had_is_told_among_the_rest():
    told = devices.describe(ctl.config(runtime=dict(logical_devices=8)).runtime)
    assert "strategy    auto cannot be had: runtime.logical_devices is 8, but TensorFlow" in told
    assert "TensorFlow  2." in told


def test_looking_at_a_gpu_takes_none_of_its_memory(monkeypatch):
    grown = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda d, on: grown.append((d, on))
    )
    monkeypatch.setattr(devices.strategies, "build", lambda *_, **__: list(grown))
    assert devices._hardware(ctl.config().runtime) == [("GPU:0", True)]
