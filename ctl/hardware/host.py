"""The machine around the accelerators: its CPU and its memory. Loads no TensorFlow."""

from collections.abc import Sequence
import os
import pathlib
import re

# What TensorFlow's kernels are faster by, as Linux names it on x86-64 and on ARM, and as people do.
_FLAGS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "BF16",
    "i8mm": "I8MM",
}
_GIB = 2**30


def cpu(cpuinfo: str, *, usable: int, there: int) -> str:
    """The CPU in a line: its cores, its model, and the instructions that matter.

    Args:
        cpuinfo: the text of /proc/cpuinfo; "" where there is none.
        usable: cores that this process may run on.
        there: cores of the machine.
    """
    counted = f"{usable} of {there}" if usable < there else str(there)
    counted += f" logical core{'s' * (there != 1)}"
    model = re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    listed = re.search(r"^(?:flags|Features)\s*: (.+)$", cpuinfo, re.MULTILINE)
    flags = set(listed[1].split()) if listed else set()
    names = [name for flag, name in _FLAGS.items() if flag in flags]
    return ", ".join([counted, *([model[1].strip()] if model else []), *names])


def memory(meminfo: str, *, limits: Sequence[str] = ()) -> str:
    """The memory in a line: of the machine, what is available, and the bound of a container.

    Args:
        meminfo: the text of /proc/meminfo; "" where there is none.
        limits: what control groups say of their memory, in bytes, or a word where they set none.
    """
    found = {
        name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.M)
    }
    if "MemTotal" not in found:
        return "unknown"
    total = found["MemTotal"]
    told = [f"{total / _GIB:.1f} GiB"]
    if "MemAvailable" in found:
        told.append(f"{found['MemAvailable'] / _GIB:.1f} GiB available")
    bounds = [int(limit) for limit in limits if limit.isdigit() and int(limit) < total]
    if bounds:
        told.append(f"bounded to {min(bounds) / _GIB:.1f} GiB by the container")
    return ", ".join(told)


def describe() -> list[tuple[str, str]]:
    """Lines of a name and what it comes to on this machine."""
    there = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    groups = ("memory.max", "memory/memory.limit_in_bytes")  # of version 2 and 1
    limits = [_text(f"/sys/fs/cgroup/{name}") for name in groups]
    return [
        ("CPU", cpu(_text("/proc/cpuinfo"), usable=usable, there=there)),
        ("memory", memory(_text("/proc/meminfo"), limits=limits)),
    ]


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text().strip()
    except OSError:
        return ""
