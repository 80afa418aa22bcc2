"""Starts the compiler in a process of its own, bounded in time and memory, and reads what it found."""

import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
from typing import Any

from ctl.errors import Failure
from ctl.modes.aot_compile.slices import GIB, Slice

QUICK, DEFAULT = -1.0, 0.0
NEAR = 0.85  # of the memory: from there on the quick setting's answer is not the last word
_COMPILER = pathlib.Path(__file__).with_name("compiler.py")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # else it waits for a TPU's metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any will do: the topology is an argument
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second compiler at the same time is refused
}
_NEEDED = re.compile(
    r"\(([\d.]+)([KMGT])\) exceeds available HBM|Used ([\d.]+)([KMGT]) of [\d.]+\w"
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TOLD = 500  # characters of a compiler's message


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What one compilation may take.

    Attributes:
        seconds: of time.
        bytes: of memory.
    """

    seconds: float = 900.0
    bytes: int = 16 * GIB


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler found.

    Attributes:
        error: why it does not compile; "" where it does.
        out_of_memory: whether that is for want of memory.
        peak_bytes: memory of a core at the most, also where it is too much, as far as it is known.
        argument_bytes: weights, slots, the batch.
        temporary_bytes: activations and what else lives within the step.
        flops: of a core, a step.
        bytes: read and written by a core, a step.
        all_reduces: how many, after they were combined.
        all_reduce_bytes: of all of them.
        seconds: of compiling.
        effort: the effort that found it.
    """

    error: str = ""
    out_of_memory: bool = False
    peak_bytes: int = 0
    argument_bytes: int = 0
    temporary_bytes: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    all_reduces: int = 0
    all_reduce_bytes: int = 0
    seconds: float = 0.0
    effort: float = QUICK


def compile_for(
    hlo: bytes, slice_: Slice, python: pathlib.Path, bounds: Bounds | None = None
) -> Compiled:
    """Compiles a program for a slice: quickly, and again at the default effort near the limit.

    The quick setting uses more memory than the default: it must not have the last word.

    Args:
        hlo: a program of one replica.
        slice_: what to compile for.
        python: the interpreter of the compiler's environment.
        bounds: what each compilation may take.

    Raises:
        Failure: the compiler's packages are not the right ones.
    """
    bounds = bounds or Bounds()
    quick = once(hlo, slice_, python, bounds, effort=QUICK)
    near = quick.out_of_memory or quick.peak_bytes > NEAR * slice_.hbm_bytes
    if not near:
        return quick
    slow = once(hlo, slice_, python, bounds, effort=DEFAULT)
    return dataclasses.replace(slow, seconds=round(quick.seconds + slow.seconds, 2))


def once(
    hlo: bytes, slice_: Slice, python: pathlib.Path, bounds: Bounds, *, effort: float
) -> Compiled:
    """Compiles a program for a slice once, at one effort; as `compile_for`."""
    with tempfile.TemporaryDirectory(prefix="ctl-aot-") as name:
        folder = pathlib.Path(name)
        (folder / "program.hlo").write_bytes(hlo)
        request = {
            "hlo": str(folder / "program.hlo"),
            "topology": slice_.compiler_name,
            "cores": slice_.cores,
            "host_chips": slice_.host_chips,
            "effort": effort,
            "seconds": math.ceil(bounds.seconds)
            + 5,  # its own limit, should this process be killed
        }
        (folder / "request.json").write_text(json.dumps(request))
        answer = _run([str(python), str(_COMPILER), str(folder / "request.json")], folder, bounds)
    return _read(answer, effort)


def _run(command: list[str], folder: pathlib.Path, bounds: Bounds) -> dict[str, Any]:
    output, errors = folder / "output", folder / "errors"
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "HOME": str(folder), **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        stopped = _watch(process, bounds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if stopped:
        return {"error": stopped, "kind": "bounds"}
    lines = output.read_text(errors="replace").splitlines()
    if process.returncode or not lines:
        told = " ".join(errors.read_text(errors="replace").split())[-_TOLD:]
        return {"error": f"the compiler ended with {process.returncode}: {told or 'no word'}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _watch(process: subprocess.Popen, bounds: Bounds) -> str:
    """Waits for the compiler to end; says why it has to be stopped, or nothing."""
    end = time.monotonic() + bounds.seconds
    while process.poll() is None:
        if time.monotonic() > end:
            return f"the compiler was stopped after {bounds.seconds:g} s, its limit"
        if _resident(process.pid) > bounds.bytes:
            return f"the compiler was stopped at {bounds.bytes / GIB:g} GiB of memory, its limit"
        time.sleep(0.05)
    return ""


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds; a limit of its address space would stop libtpu at once."""
    try:
        pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):  # it has just ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _read(answer: dict[str, Any], effort: float) -> Compiled:
    error = answer.pop("error", "")
    kind = answer.pop("kind", "")
    if kind == "versions":
        raise Failure(
            f"The TPU compiler's packages are not the ones that ctl knows ({error}): ask for the "
            "versions of ctl/modes/aot_compile/requirements.txt."
        )
    known = {field.name for field in dataclasses.fields(Compiled)}
    values = {name: value for name, value in answer.items() if name in known}
    if not error:
        return Compiled(**values, effort=effort)
    first = " ".join(error.split())
    return Compiled(
        **values,
        error=first[:_TOLD],
        out_of_memory="RESOURCE_EXHAUSTED" in first and "emory" in first,
        peak_bytes=_needed(first),
        effort=effort,
    )


def _needed(error: str) -> int:
    found = _NEEDED.search(error)
    if not found:
        return 0
    number, unit = [group for group in found.groups() if group]
    return int(float(number) * _UNITS[unit])
