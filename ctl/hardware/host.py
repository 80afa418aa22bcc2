"""Describes the CPU and the memory of this machine."""

from collections.abc import Sequence
import os
import pathlib
import platform
import re
import resource

_GIB = 2**30
_CONTROL_GROUP = pathlib.Path("/sys/fs/cgroup")
_INSTRUCTIONS = re.compile(r"(?:avx|fma|f16c|amx|asimd|sve|sme(?!p))")
# Environment variables that make libraries choose other kernels.
_KERNEL_VARIABLES = (
    "ONEDNN_", "DNNL_", "TF_ENABLE_ONEDNN", "TF_XLA_FLAGS", "XLA_FLAGS", "NVIDIA_TF32",
)  # fmt: skip
# Files of the control group of a container, in version 2 and version 1 of the interface.
_MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def describe() -> list[tuple[str, str]]:
    """Returns rows (name, description) about this machine."""
    total, usable = os.cpu_count() or 1, usable_cores()
    limits = [_read(_CONTROL_GROUP / name) for name in _MEMORY_LIMITS]
    return [
        ("CPU", describe_cpu(_read(pathlib.Path("/proc/cpuinfo")), usable=usable, total=total)),
        ("memory", describe_memory(_read(pathlib.Path("/proc/meminfo")), limits=limits)),
    ]


def usable_cores() -> int:
    """Returns the number of logical cores that this process may run on."""
    # taskset and container runtimes restrict a process to some cores; macOS has no such call.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def identify_cpu() -> tuple[str, str]:
    """Returns the model of the CPU, and its instruction sets for vectors and matrices.

    Libraries choose their kernels by these, so they determine the bits of a result.
    """
    text = _read(pathlib.Path("/proc/cpuinfo"))
    # A virtual machine may hide the name of the model: the numbers distinguish generations.
    fields = dict(re.findall(r"(?m)^(model name|cpu family|model)\s*: (.+)$", text))
    parts = [fields.get("model name") or platform.processor() or platform.machine()]
    numbers = {"family": "cpu family", "model": "model"}
    parts += [f"{name} {fields[key]}" for name, key in numbers.items() if key in fields]
    flags = re.findall(r"(?m)^(?:flags|Features)\s*: (.+)$", text)[:1]
    names = {flag for flag in " ".join(flags).split() if _INSTRUCTIONS.match(flag)}
    return ", ".join(parts), " ".join(sorted(names))


def describe_kernels(threads: int = 0) -> dict[str, str]:
    """Returns the facts by which libraries choose CPU kernels, which determine the bits of a result.

    Args:
        threads: the threads of an operation; 0: one per usable core.
    """
    model, instructions = identify_cpu()
    variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_KERNEL_VARIABLES)}
    return {
        "CPU": model,
        "instruction sets": instructions,
        # Some kernels divide a sum by the number of threads.
        "threads": str(threads or usable_cores()),
        **variables,
    }


def describe_cpu(cpuinfo: str, *, usable: int, total: int) -> str:
    """Describes the CPU in one line.

    Args:
        cpuinfo: the text of /proc/cpuinfo; "" on a system without it.
        usable: number of logical cores that this process may run on.
        total: number of logical cores of the machine.
    """
    count = f"{usable} of {total}" if usable < total else str(total)
    # ARM kernels print no model name.
    model = re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    cores = f"{count} logical core{'s' * (total != 1)}"
    return f"{cores}, {model[1].strip()}" if model else cores


def memory_limit() -> int | None:
    """Returns the bytes that a new process may use; None if they are not known.

    It is the least of the limits of `ulimit` and nine tenths of the memory that is available on the
    machine or in the container: other programs need the rest.
    """
    texts = [_read(_CONTROL_GROUP / name) for name in _MEMORY_LIMITS]
    sizes = [int(text) for text in texts if text.isdigit()]
    available = _parse_meminfo(_read(pathlib.Path("/proc/meminfo"))).get("MemAvailable")
    limits = [size * 9 // 10 for size in (available, *sizes) if size]
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        limit = resource.getrlimit(kind)[0]
        limits += [limit] * (limit != resource.RLIM_INFINITY)
    return min(limits, default=None)


def peak_memory() -> int:
    """Returns the peak of the bytes that RLIMIT_DATA limits, nearly; only Linux reports them."""
    status = _parse_meminfo(_read(pathlib.Path("/proc/self/status")))
    # The kernel records the peak of all mapped memory; the rest of it, such as code, changes little.
    return status["VmData"] + status["VmPeak"] - status["VmSize"]


def describe_memory(meminfo: str, *, limits: Sequence[str] = ()) -> str:
    """Describes the memory of the machine, and the limit of the container, in one line.

    Args:
        meminfo: the text of /proc/meminfo; "" on a system without it.
        limits: contents of the files of control groups: bytes, or "max" for no limit.
    """
    sizes = _parse_meminfo(meminfo)
    if "MemTotal" not in sizes:
        return "unknown"
    total = sizes["MemTotal"]
    parts = [f"{total / _GIB:.1f} GiB"]
    if "MemAvailable" in sizes:  # since Linux 3.14
        parts.append(f"{sizes['MemAvailable'] / _GIB:.1f} GiB available")
    # Version 1 of control groups expresses "no limit" by a number larger than any memory.
    effective = [int(limit) for limit in limits if limit.isdigit() and int(limit) < total]
    if effective:
        parts.append(f"limited to {min(effective) / _GIB:.1f} GiB by the container")
    return ", ".join(parts)


def _parse_meminfo(text: str) -> dict[str, int]:
    """Returns the sizes of a file such as /proc/meminfo in bytes."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"(?m)^(\w+):\s+(\d+) kB", text)}


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
