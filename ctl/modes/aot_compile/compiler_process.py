"""Runs the compiler in its own process, with limits of time and memory, and reads its result."""

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
# The quick effort can need more memory than the default one, so a program that needs more than
# this part of the memory is compiled again at the default effort.
NEAR_LIMIT = 0.85
_COMPILER = pathlib.Path(__file__).with_name("compiler.py")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # otherwise it waits for a TPU's metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any type: the topology is passed as an argument
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise a second concurrent compiler is rejected
}
_NEEDED_MEMORY = re.compile(
    r"\(([\d.]+)([KMGT])\) exceeds available HBM|Used ([\d.]+)([KMGT]) of [\d.]+\w"
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_MESSAGE = 500  # characters of the compiler's message


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one compilation.

    Attributes:
        seconds: the maximum duration.
        bytes: the maximum resident memory.
    """

    seconds: float = 900.0
    bytes: int = 16 * GIB


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of one compilation; all sizes are per core.

    Attributes:
        error: why the program does not compile; "" if it does.
        out_of_memory: whether it does not compile because it needs too much memory.
        peak_bytes: peak memory, even if it is too much; 0 if the compiler does not report it.
        argument_bytes: weights, slot variables and the batch.
        flops: floating-point operations of one step.
        bytes: bytes read and written by one step.
        all_reduces: number of all-reduces after the compiler combined them.
        all_reduce_bytes: total size of the all-reduces.
        seconds: time that the compilation took.
        effort: the compiler's effort.
    """

    error: str = ""
    out_of_memory: bool = False
    peak_bytes: int = 0
    argument_bytes: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    all_reduces: int = 0
    all_reduce_bytes: int = 0
    seconds: float = 0.0
    effort: float = QUICK


def compile_program(
    hlo: bytes, slice_: Slice, python: pathlib.Path, limits: Limits | None = None
) -> Compiled:
    """Compiles a program for a slice: quickly, and again at the default effort near the limit.

    Args:
        hlo: the program of one replica, a serialized HLO module.
        slice_: the slice to compile for.
        python: the interpreter of the compiler's environment.
        limits: the limits of each compilation.

    Raises:
        Failure: the compiler's packages have the wrong versions.
    """
    limits = limits or Limits()
    quick = compile_once(hlo, slice_, python, limits, effort=QUICK)
    if not quick.out_of_memory and quick.peak_bytes <= NEAR_LIMIT * slice_.hbm_bytes:
        return quick
    slow = compile_once(hlo, slice_, python, limits, effort=DEFAULT)
    return dataclasses.replace(slow, seconds=round(quick.seconds + slow.seconds, 2))


def compile_once(
    hlo: bytes, slice_: Slice, python: pathlib.Path, limits: Limits, *, effort: float
) -> Compiled:
    """Compiles a program once, at one effort; see `compile_program` for the other arguments."""
    with tempfile.TemporaryDirectory(prefix="ctl-aot-") as name:
        folder = pathlib.Path(name)
        (folder / "program.hlo").write_bytes(hlo)
        request = {
            "hlo": str(folder / "program.hlo"),
            "topology": slice_.compiler_name,
            "cores": slice_.cores,
            "host_chips": slice_.host_chips,
            "effort": effort,
            "seconds": math.ceil(limits.seconds) + 5,  # ends the compiler if this process is killed
        }
        (folder / "request.json").write_text(json.dumps(request))
        answer = _run([str(python), str(_COMPILER), str(folder / "request.json")], folder, limits)
    return _parse_answer(answer, effort)


def _run(command: list[str], folder: pathlib.Path, limits: Limits) -> dict[str, Any]:
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
        exceeded = _wait(process, limits)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if exceeded:
        return {"error": exceeded, "kind": "limits"}
    lines = output.read_text(errors="replace").splitlines()
    if process.returncode or not lines:
        message = " ".join(errors.read_text(errors="replace").split())[-_MAX_MESSAGE:]
        return {
            "error": f"the compiler ended with exit code {process.returncode}: "
            f"{message or 'no message'}"
        }
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _wait(process: subprocess.Popen, limits: Limits) -> str:
    """Waits for the compiler to end; returns which limit it exceeded, or ""."""
    end = time.monotonic() + limits.seconds
    while process.poll() is None:
        if time.monotonic() > end:
            return f"the compiler was stopped after {limits.seconds:g} s, its limit"
        if _resident_bytes(process.pid) > limits.bytes:
            return f"the compiler was stopped at {limits.bytes / GIB:g} GiB of memory, its limit"
        time.sleep(0.05)
    return ""


def _resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process in bytes.

    The memory is polled, since a limit on the address space would stop libtpu at its start.
    """
    try:
        pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):  # the process has just ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _parse_answer(answer: dict[str, Any], effort: float) -> Compiled:
    error = " ".join(answer.pop("error", "").split())
    if answer.pop("kind", "") == "versions":
        raise Failure(
            f"The TPU compiler's packages have the wrong versions ({error}): install the versions of "
            "ctl/modes/aot_compile/requirements.txt."
        )
    fields = {field.name for field in dataclasses.fields(Compiled)}
    figures = {name: value for name, value in answer.items() if name in fields}
    if not error:
        return Compiled(**figures, effort=effort)
    return Compiled(
        **figures,
        error=error[:_MAX_MESSAGE],
        out_of_memory="RESOURCE_EXHAUSTED" in error and "emory" in error,
        peak_bytes=_parse_needed_bytes(error),
        effort=effort,
    )


def _parse_needed_bytes(error: str) -> int:
    match = _NEEDED_MEMORY.search(error)
    if not match:
        return 0
    number, unit = [group for group in match.groups() if group]
    return int(float(number) * _UNITS[unit])
