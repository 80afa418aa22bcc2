"""What this machine has to train on, and what a config comes to on it: --mode=devices.

Importing this loads no TensorFlow.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import os
import subprocess
from typing import Any

from ctl.errors import UsageError
from ctl.hardware import devices, gpu, host, strategies, tpu

Row = tuple[str, str]
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version"]
_XLA_VARIABLES = ("TF_XLA_FLAGS", "XLA_FLAGS")


@dataclasses.dataclass(frozen=True)
class DriverGpu:
    """A GPU as NVIDIA's driver tells it.

    Attributes:
        name: the product's.
        memory: in MiB, as a text; or a reason in brackets.
        driver: its version.
    """

    name: str
    memory: str
    driver: str


def describe(runtime: Any) -> str:
    """Lines of a name and what it comes to on this machine; writes nothing, trains nothing.

    Args:
        runtime: the `runtime` section of a checked config.
    """
    import tensorflow as tf

    details = [
        tf.config.experimental.get_device_details(d) for d in tf.config.list_physical_devices("GPU")
    ]
    told = driver_gpus()
    build = tf.sysconfig.get_build_info()
    rows = [
        *host.describe(),
        ("TensorFlow", tensorflow(tf.__version__, build, os.environ)),
        *gpus(details, told, cuda=bool(build.get("is_cuda_build"))),
        ("TPU", tpus()),
        *_chosen(runtime),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def tensorflow(version: str, build: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """TensorFlow's build in a line, and the flags that XLA will read.

    Args:
        version: TensorFlow's.
        build: what `tf.sysconfig.get_build_info` returned.
        environment: the variables of this process.
    """
    if build.get("is_cuda_build"):
        kind = f"CUDA {build.get('cuda_version', '?')}, cuDNN {build.get('cudnn_version', '?')}"
    elif build.get("is_rocm_build"):
        kind = "ROCm"
    else:
        kind = "without CUDA"
    flags = [f"{name}={environment[name]}" for name in _XLA_VARIABLES if environment.get(name)]
    return ", ".join([version, kind, *(flags or ["no XLA flags in the environment"])])


def gpus(
    details: Sequence[Mapping[str, Any]], told: Sequence[DriverGpu], *, cuda: bool
) -> list[Row]:
    """A row a GPU, or one that says why there is none.

    Args:
        details: what TensorFlow tells of each GPU that it sees.
        told: what the driver tells of each that this process may see, in the same order.
        cuda: whether TensorFlow is built for GPUs.
    """
    if details:
        known = list(told) if len(told) == len(details) else [None] * len(details)
        return [
            (f"GPU {i}", _gpu(*both)) for i, both in enumerate(zip(details, known, strict=True))
        ]
    if not told:
        return [("GPUs", "none")]
    names = ", ".join(f"{g.name} (driver {g.driver})" for g in told)
    mend = (
        "its libraries may be missing, which TF_CPP_MIN_LOG_LEVEL=0 tells"
        if cuda
        else "this build is not for GPUs; BUILD.md tells how to install the one that is"
    )
    return [("GPUs", f"none that TensorFlow sees, but {names}: {mend}")]


def driver_gpus() -> list[DriverGpu]:
    """The GPUs that this process may see, as NVIDIA's driver tells them; none where it does not."""
    names = gpu.visible_gpus()
    if names == []:
        return []
    which = ["-i", ",".join(names)] if names else []
    query = [*_QUERY, "--format=csv,noheader,nounits", *which]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
    return [DriverGpu(*row) for row in rows if len(row) == 3]


def tpus() -> str:
    """The TPU of this machine in a line, or what is missing to use one."""
    chips = tpu.chips()
    lack = tpu.missing()
    there = f"{len(chips)} x {chips[0]}" if chips else "none"
    if not lack:
        return there
    return f"{there}, which cannot be used: {lack}" if chips else f"none: {lack}"


def _gpu(details: Mapping[str, Any], told: DriverGpu | None) -> str:
    name = details.get("device_name", "of an unknown name")
    capability = ".".join(str(n) for n in details.get("compute_capability", ())) or "unknown"
    size = "unknown"
    # Under another name it is another GPU, or the whole of which this one is a part (MIG).
    if told and told.name == name and told.memory.isdigit():
        size = f"{int(told.memory) / 1024:.1f} GiB"
    driver = told.driver if told else "unknown"
    return f"{name}, memory {size}, compute capability {capability}, driver {driver}"


def _chosen(runtime: Any) -> list[Row]:
    """The strategy and the compilation that the config comes to, and why."""
    from ctl.replica import xla as replica_compile

    request = strategies.Request.of(runtime, os.environ)
    try:
        name = strategies.resolve_name(runtime.strategy, request)
        if name != "auto" and (strategies.STRATEGIES[name].processes or name == "tpu"):
            return [("strategy", f"{name}: {strategies.STRATEGIES[name].summary}")]
        hardware = _hardware(runtime)
    except UsageError as error:
        return [("strategy", f"{runtime.strategy} cannot be had: {error}")]
    replicas = hardware.strategy.num_replicas_in_sync
    gpu_ = any("GPU" in device for device in devices.replica_devices(hardware.strategy))
    mode, why = replica_compile.choose(
        runtime.xla,
        gpu=gpu_,
        replicas=replicas,
        sync_batch_norm=False,
        shards=bool(runtime.logical_shards),
    )
    plural = "s" if replicas != 1 else ""
    return [
        ("strategy", f"{hardware.name} ({hardware.why}), {replicas} replica{plural}"),
        ("xla", f"{mode} ({why}); the model and the data may change it, --mode=explain tells"),
    ]


def _hardware(runtime: Any) -> strategies.Hardware:
    import tensorflow as tf

    if not runtime.logical_devices:  # to look is no reason to take a GPU's memory from who trains
        for device in tf.config.list_physical_devices("GPU"):
            with contextlib.suppress(RuntimeError):  # a config file has started TensorFlow
                tf.config.experimental.set_memory_growth(device, True)
    return strategies.build(runtime.strategy, strategies.Request.of(runtime, os.environ))
