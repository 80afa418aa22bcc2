"""How much of the GPUs' memory TensorFlow takes, and which GPUs it may see.

Importing this loads no TensorFlow.
"""

from collections.abc import Mapping, Sequence
import os
import subprocess

from ctl.errors import UsageError
from ctl.hardware.cluster import Cluster

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process, by index or UUID.

    Args:
        environment: the variables of a process.

    Returns:
        What CUDA takes of the list, which ends for it where an index is negative; None for all.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    found: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        if not name or name.startswith("-"):
            break
        found.append(name)
    return found


def set_memory(*, growth: bool, limit_mib: int) -> None:
    """Makes TensorFlow take less than nearly all of each GPU's memory, before it uses one.

    Args:
        growth: take memory as it is needed, and keep it.
        limit_mib: take so many MiB of each GPU and no more; 0 for no limit.

    Raises:
        UsageError: there is no GPU, or TensorFlow has started already.
    """
    if not growth and not limit_mib:
        return
    import tensorflow as tf

    key, off = ("memory_growth", "false") if growth else ("memory_limit_mib", "0")
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise UsageError(f"runtime.gpu.{key} has no effect: there is no GPU here. Set it to {off}.")
    if growth and os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() in ("false", "0"):
        raise UsageError(
            "runtime.gpu.memory_growth has no effect while TF_FORCE_GPU_ALLOW_GROWTH is false: "
            "unset the variable."
        )
    limited = [tf.config.LogicalDeviceConfiguration(memory_limit=limit_mib)]
    try:
        for gpu in gpus:
            if growth:
                tf.config.experimental.set_memory_growth(gpu, True)
            else:
                tf.config.set_logical_device_configuration(gpu, limited)
    except (RuntimeError, ValueError):
        raise UsageError(
            f"runtime.gpu.{key} comes too late: TensorFlow has started already. Let nothing use it "
            "before the strategy is built, such as a tensor that the trainer's file makes when it "
            "is imported."
        ) from None


def list_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a process with this environment may use: numbers or UUIDs, none without a driver."""
    named = visible_gpus(environment)
    if named is not None:
        return named
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


def divide_among_processes(places: Sequence[Cluster], gpus: Sequence[str]) -> list[dict[str, str]]:
    """Environment variables that give each worker its own GPUs.

    Args:
        places: the processes.
        gpus: what there is.

    Returns:
        For each process its variables; nothing where there are no GPUs. A chief beside parameter
        servers and the servers compute nothing, and get none.
    """
    if not gpus:
        return [{} for _ in places]
    compute = [place for place in places if place.role == "worker"]
    result = []
    for place in places:
        own: Sequence[str] = []
        if place.role == "worker":
            each, rest = divmod(len(gpus), len(compute))
            start = place.index * each + min(place.index, rest)
            own = gpus[start : start + each + (place.index < rest)]
        result.append({_VISIBLE_DEVICES: ",".join(own) or "-1"})
    return result
