"""The machine's GPUs as the driver numbers them, divided among processes. Loads no TensorFlow."""

from collections.abc import Mapping, Sequence
import subprocess

from ctl.hardware import gpu
from ctl.hardware.cluster import Cluster

_KEY = "CUDA_VISIBLE_DEVICES"


def visible(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a process with this environment may use: numbers or UUIDs, none without a driver."""
    named = gpu.visible(environment)
    if named is not None:
        return named
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


def divided(places: Sequence[Cluster], gpus: Sequence[str]) -> list[dict[str, str]]:
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
        result.append({_KEY: ",".join(own) or "-1"})
    return result
