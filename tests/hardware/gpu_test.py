"""NVIDIA GPUs as the driver reports them, and which of them a process may use."""

import sys

import pytest
import tensorflow as tf

from ctl.hardware import cluster, gpu
from ctl.hardware.gpu import DriverGpu
from tests.support.fake_nvml import FakeGpu, FakeNvml

GIB = 2**30
NO_GPU = not tf.config.list_physical_devices("GPU")


@pytest.fixture
def install(monkeypatch):
    """Replaces pynvml and the environment: install([FakeGpu(), ...], CUDA_VISIBLE_DEVICES="0")."""

    def replace(gpus=(), *, driver=True, **environment):
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            if value is not None:
                monkeypatch.setenv(name, value)
        nvml = FakeNvml(gpus, driver=driver)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return replace


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, None),
        ("", []),
        ("1,-1,0", ["1"]),
        (" 2 , GPU-ab ", ["2", "GPU-ab"]),
    ],
)
def test_cuda_visible_devices_names_the_gpus_until_the_first_negative_index(
    install, variable, names
):
    install(CUDA_VISIBLE_DEVICES=variable)
    assert gpu.visible_gpus() == names
    assert gpu.list_gpus() == (names or [])


def test_without_a_driver_there_are_no_gpus(install, monkeypatch):
    install(driver=False)
    assert (gpu.list_gpus(), gpu.describe_gpus(), gpu.read_usage()) == ([], [], {})


@pytest.mark.skipif(not NO_GPU, reason="is about a machine without a GPU")
def test_the_real_driver_lists_no_gpus(install, monkeypatch):
    install()
    monkeypatch.delitem(sys.modules, "pynvml")
    assert (gpu.list_gpus(), gpu.describe_gpus(), gpu.read_usage()) == ([], [], {})


MACHINE = [
    FakeGpu(total=143771 * 2**20, name="NVIDIA H200", uuid="GPU-8f3c"),
    FakeGpu(total=None, name="NVIDIA GB10", uuid="GPU-77aa"),
    FakeGpu(total=16 * GIB, name="NVIDIA H200 MIG 1g.18gb", uuid="MIG-1a"),
]


def test_uuids_identify_the_gpus_when_another_one_is_lost(install):
    install(MACHINE)
    assert gpu.list_uuids() == ["GPU-8f3c", "GPU-77aa", "MIG-1a"]
    install(MACHINE, CUDA_VISIBLE_DEVICES="1")
    assert gpu.list_uuids() == ["1"]
    install(driver=False, CUDA_VISIBLE_DEVICES="0,1")
    assert gpu.list_uuids() == ["0", "1"]


def test_lost_gpu_is_skipped(install):
    install([FakeGpu(uuid="GPU-a"), FakeGpu(is_lost=True), FakeGpu(uuid="GPU-c", used=GIB)])
    assert gpu.list_gpus() == ["0", "2"]
    assert gpu.list_uuids() == ["GPU-a", "GPU-c"]
    assert gpu.read_usage()["gpu_memory_gib"] == 1.0


H200 = DriverGpu("NVIDIA H200", 143771, "550.54.15")
WITHOUT_MEMORY = DriverGpu("NVIDIA GB10", None, "550.54.15")
MIG = DriverGpu("NVIDIA H200 MIG 1g.18gb", 16384, "550.54.15")


@pytest.mark.parametrize(
    ("variable", "indices", "described"),
    [
        (None, [0, 1, 2], [H200, WITHOUT_MEMORY, MIG]),
        ("1,0", [1, 0], [WITHOUT_MEMORY, H200]),
        ("GPU-8f3c", [0], [H200]),
        ("MIG-1a", [2], [MIG]),
        ("7", [], []),
        ("GPU-unknown", [], []),
    ],
)
def test_gpus_that_the_process_may_use_are_described_in_order(
    install, variable, indices, described
):
    nvml = install(MACHINE, CUDA_VISIBLE_DEVICES=variable)
    assert gpu.describe_gpus() == described
    assert nvml.handles == indices


TWO = [
    FakeGpu(used=3 * GIB, percent=90, uuid="GPU-0"),
    FakeGpu(used=5 * GIB, percent=20, uuid="GPU-1"),
]


@pytest.mark.parametrize(
    ("gpus", "variable", "usage"),
    [
        (TWO, None, {"gpu_memory_gib": 5.0, "gpu_utilization": 0.9}),
        (TWO, "0", {"gpu_memory_gib": 3.0, "gpu_utilization": 0.9}),
        (TWO, "GPU-1", {"gpu_memory_gib": 5.0, "gpu_utilization": 0.2}),
        (TWO, "-1", {}),
        ([FakeGpu(used=0, percent=0)], None, {"gpu_memory_gib": 0.0, "gpu_utilization": 0.0}),
        ([FakeGpu(used=3 * GIB, percent=None)], None, {"gpu_memory_gib": 3.0}),
        ([FakeGpu(used=None, percent=90)], None, {"gpu_utilization": 0.9}),
    ],
)
def test_usage_is_the_present_maximum_over_the_gpus_that_the_process_may_use(
    install, gpus, variable, usage
):
    nvml = install(gpus, CUDA_VISIBLE_DEVICES=variable)
    assert gpu.read_usage() == usage
    nvml.gpus = [FakeGpu(used=GIB, percent=10, uuid="GPU-1")] * len(gpus)
    assert gpu.read_usage() == ({"gpu_memory_gib": 1.0, "gpu_utilization": 0.1} if usage else {})


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a GPU")
def test_a_real_gpu_reports_its_name_and_its_memory():
    tf.constant(1.0) + 1.0
    assert gpu.read_usage()["gpu_memory_gib"] > 0
    described = gpu.describe_gpus()
    assert len(described) == len(gpu.list_gpus()) == len(tf.config.list_physical_devices("GPU"))
    assert all(each.name and each.memory_mib and each.driver for each in described)


@pytest.mark.parametrize(
    ("gpus", "shares"),
    [
        (["0", "1", "2", "3"], ["0,1", "2,3"]),
        (["0", "1", "2"], ["0,1", "2"]),
        (["0"], ["0", "-1"]),
    ],
)
def test_workers_share_the_gpus(gpus, shares):
    clusters = cluster.make_local_clusters(workers=2, servers=0, ports=[1, 2])
    variables = gpu.divide_among_processes(clusters, gpus)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in variables] == shares


def test_only_workers_get_gpus():
    clusters = cluster.make_local_clusters(workers=1, servers=1, ports=[1, 2, 3])
    variables = gpu.divide_among_processes(clusters, ["0", "1"])
    assert [each["CUDA_VISIBLE_DEVICES"] for each in variables] == ["-1", "0,1", "-1"]
    assert gpu.divide_among_processes(clusters, []) == [{}, {}, {}]


def test_libraries_of_the_packages_of_nvidia_are_found(tmp_path, monkeypatch):
    build = {"cuda_version": "12.5.1", "cudnn_version": "9"}
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    missing = gpu.find_missing_libraries(build)
    assert "libcudnn.so.9" in missing and "libcufft.so.11" in missing
    (tmp_path / "nvidia/cudnn/lib").mkdir(parents=True)
    (tmp_path / "nvidia/cudnn/lib/libcudnn.so.9").touch()
    assert gpu.find_missing_libraries(build) == [x for x in missing if x != "libcudnn.so.9"]
