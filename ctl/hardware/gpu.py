"""NVIDIA GPUs as the driver reports them through NVML, and which of them a process may use.

This is the only module that uses nvidia-ml-py. A machine without a driver has no GPUs here, whatever
build of TensorFlow is installed.
"""

from collections.abc import Callable, Mapping, Sequence
import ctypes
import dataclasses
import logging
import os
import pathlib
import sys
from typing import Any, TypeVar

from ctl.hardware.cluster import Cluster

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_GIB, _MIB = 2**30, 2**20
_LOG = logging.getLogger("ctl")
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver reports it.

    Attributes:
        name: name of the product, such as "NVIDIA H200".
        memory_mib: total memory in MiB; None if the driver does not report it.
        driver: version of the driver.
    """

    name: str
    memory_mib: int | None
    driver: str


def visible_gpus() -> list[str] | None:
    """Reads the GPUs that CUDA_VISIBLE_DEVICES allows this process to use.

    Returns:
        Indices, or UUIDs such as "GPU-8f3c..." or "MIG-1a..."; None if the variable is not set, which
        allows all GPUs.
    """
    value = os.environ.get(_VISIBLE_DEVICES)
    if value is None:
        return None
    names: list[str] = []
    for name in (part.strip() for part in value.split(",")):
        # CUDA ignores an invalid index, such as -1, and everything after it.
        if not name or name.startswith("-"):
            break
        names.append(name)
    return names


def list_gpus() -> list[str]:
    """Lists the indices or UUIDs of the GPUs that this process may use."""
    # A lost GPU keeps its index until the driver is loaded again: the indices may have a gap.
    return _visible_or("nvmlDeviceGetIndex")


def list_uuids() -> list[str]:
    """Lists the GPUs of `list_gpus` as CUDA finds them, also after another GPU was lost.

    Without CUDA_VISIBLE_DEVICES these are UUIDs, because CUDA numbers the GPUs in another order than
    the driver, and without gaps.
    """
    return _visible_or("nvmlDeviceGetUUID")


def _visible_or(function: str) -> list[str]:
    """Returns the names in CUDA_VISIBLE_DEVICES, or what a function of NVML returns for each GPU."""
    names = visible_gpus()
    if names is not None:
        return names
    return _query(lambda nvml, handle: str(getattr(nvml, function)(handle)))


def describe_gpus() -> list[DriverGpu]:
    """Describes the GPUs that this process may use; [] without a driver."""
    return _query(_describe)


def find_memory_mib(product: str) -> int | None:
    """Returns the memory of a GPU that this process uses; None if the driver does not report it.

    The GPU is found by its name. Its index is of no use, because CUDA may number the GPUs in another
    order than the driver (CUDA_DEVICE_ORDER).

    Args:
        product: the name of the product, such as "NVIDIA H200".
    """
    # MIG instances are reported only by the UUIDs in CUDA_VISIBLE_DEVICES, and an index in it may be
    # the driver's index of another GPU.
    for gpus in (describe_gpus(), _query(_describe, all_gpus=True)):
        sizes = [gpu.memory_mib for gpu in gpus if gpu.name == product and gpu.memory_mib]
        if sizes:
            return min(sizes)
    return None


def read_usage() -> dict[str, float]:
    """Reads the current memory and utilization of the GPUs that this process may use.

    Returns:
        gpu_memory_gib: the memory in use on the fullest GPU, in GiB. By default TensorFlow allocates
        nearly all memory at the start; with TF_FORCE_GPU_ALLOW_GROWTH=true this is what the run needs.
        gpu_utilization: the fraction of the time during which the busiest GPU ran a kernel.
        A value that the driver does not report is missing; without a driver both are.
    """
    usage = {
        "gpu_memory_gib": _query(lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _GIB),
        # Not reported for an instance of a partitioned GPU (MIG).
        "gpu_utilization": _query(
            lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
        ),
    }
    return {name: max(values) for name, values in usage.items() if values}


def divide_among_processes(
    clusters: Sequence[Cluster], gpus: Sequence[str]
) -> list[dict[str, str]]:
    """Divides the GPUs of this machine among the workers of a run.

    Args:
        clusters: one per process of the run.
        gpus: indices or UUIDs of the GPUs, as `list_gpus` returns them.

    Returns:
        The environment variables to set for each process; none if there are no GPUs. Parameter
        servers, and the chief that coordinates them, compute nothing and may use no GPU.
    """
    if not gpus:
        return [{} for _ in clusters]
    # The first `remainder` workers get one GPU more than the others.
    size, remainder = divmod(len(gpus), sum(cluster.role == "worker" for cluster in clusters))
    variables = []
    for cluster in clusters:
        start = cluster.index * size + min(cluster.index, remainder)
        end = start + size + (cluster.index < remainder)
        share = gpus[start:end] if cluster.role == "worker" else []
        variables.append({_VISIBLE_DEVICES: ",".join(share) or "-1"})  # -1 hides all GPUs
    return variables


def _query(read: Callable[[Any, Any], _T], *, all_gpus: bool = False) -> list[_T]:
    """Applies `read` to NVML and the handle of each GPU.

    Args:
        read: reads a value.
        all_gpus: whether to query all GPUs of this machine, not only those that this process may use.

    Returns:
        The results, in the order of CUDA_VISIBLE_DEVICES, without the GPUs that the driver rejects,
        such as a lost one, or for which it rejects the query; [] if there is no driver.
    """
    import pynvml  # 40 ms, which programs that never query the driver should not spend

    try:
        # NVML counts calls of nvmlInit, and all but the first are cheap. Hence there is no call of
        # nvmlShutdown: the next query would load the driver's library again.
        pynvml.nvmlInit()
        names = None if all_gpus else visible_gpus()
        if names is None:
            names = [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        _LOG.debug("The NVIDIA driver does not report the GPUs: %s", error)
        return []
    results = []
    for name in names:
        try:
            by_uuid = pynvml.nvmlDeviceGetHandleByUUID  # also for a MIG instance
            by_index = pynvml.nvmlDeviceGetHandleByIndex
            results.append(read(pynvml, by_index(int(name)) if name.isdigit() else by_uuid(name)))
        except pynvml.NVMLError as error:
            _LOG.debug("The NVIDIA driver does not report GPU %s: %s", name, error)
    return results


def _describe(nvml: Any, handle: Any) -> DriverGpu:
    try:
        memory_mib = nvml.nvmlDeviceGetMemoryInfo(handle).total // _MIB
    except nvml.NVMLError:  # GPUs that share the memory of the host do not report it
        memory_mib = None
    name, driver = nvml.nvmlDeviceGetName(handle), nvml.nvmlSystemGetDriverVersion()
    return DriverGpu(name, memory_mib, driver)


def find_missing_libraries(build: Mapping[str, Any]) -> list[str]:
    """Lists the libraries of CUDA and cuDNN that a build of TensorFlow needs and that cannot be loaded.

    Args:
        build: the result of `tf.sysconfig.get_build_info` of a build for CUDA.
    """
    cuda = str(build.get("cuda_version", "12")).partition(".")[0]
    cudnn = str(build.get("cudnn_version", "9")).partition(".")[0]
    versions = {"cudart": cuda, "cublas": cuda, "cusparse": cuda, "cudnn": cudnn}
    if cuda == "12":
        versions |= {"cufft": "11", "cusolver": "11"}
    return [
        name for key, version in versions.items() if not _loads(name := f"lib{key}.so.{version}")
    ]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        # The packages of NVIDIA on the package index, whose folders TensorFlow searches.
        return any(next(pathlib.Path(p).glob(f"nvidia/*/lib/{library}"), None) for p in sys.path)
    return True
