"""Runs the compiler in a process and an environment of its own, and reads its result.

uv makes the environment of ctl/modes/aot_compile/requirements.txt, and keeps its packages in its cache.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from ctl.errors import Failure, UsageError
from ctl.modes.aot_compile.slices import TpuSlice

QUICK, DEFAULT = -1.0, 0.0
# The quick effort can need more memory than the default one, so a program that needs more than
# this part of the memory is compiled again at the default effort.
NEAR_LIMIT = 0.85
PINS = pathlib.Path(__file__).with_name("requirements.txt")
_PYTHON = ">=3.11"  # jax 0.10 requires it
_DOWNLOAD_SECONDS = 900.0  # for a download of 300 MB
_INHERITED = ("PATH", "HOME", "XDG_CACHE_HOME", "UV_CACHE_DIR")
_MAX_SECONDS = 900.0  # of one compilation
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
_NO_ENVIRONMENT = "The compiler's environment cannot be made"


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


def compile_program(hlo: bytes, slice_: TpuSlice) -> Compiled:
    """Compiles a program for a slice: quickly, and again at the default effort near the limit.

    Args:
        hlo: the program of one replica, a serialized HLO module.
        slice_: the slice to compile for.

    Raises:
        UsageError: libtpu does not run on this machine.
        Failure: the environment cannot be made.
    """
    quick = compile_once(hlo, slice_, effort=QUICK)
    if not quick.out_of_memory and quick.peak_bytes <= NEAR_LIMIT * slice_.hbm_bytes:
        return quick
    slow = compile_once(hlo, slice_, effort=DEFAULT)
    return dataclasses.replace(slow, seconds=round(quick.seconds + slow.seconds, 2))


def compile_once(hlo: bytes, slice_: TpuSlice, *, effort: float) -> Compiled:
    """Compiles a program once, at one effort; see `compile_program` for the other arguments."""
    python = find_python()
    with tempfile.TemporaryDirectory(prefix="ctl-aot-") as name:
        folder = pathlib.Path(name)
        (folder / "program.hlo").write_bytes(hlo)
        request = {
            "hlo": str(folder / "program.hlo"),
            "topology": slice_.compiler_name,
            "cores": slice_.cores,
            "host_chips": slice_.host_chips,
            "effort": effort,
            "seconds": math.ceil(_MAX_SECONDS) + 5,  # ends the compiler if this process is killed
        }
        (folder / "request.json").write_text(json.dumps(request))
        answer = _run([*python, str(_COMPILER), str(folder / "request.json")], folder)
    return _parse_answer(answer, effort)


def _run(command: list[str], folder: pathlib.Path) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MAX_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the compiler was stopped after {_MAX_SECONDS:g} s, its limit"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        message = " ".join(done.stderr.split())[-_MAX_MESSAGE:] or "no message"
        return {"error": f"the compiler ended with exit code {done.returncode}: {message}"}
    return json.loads(lines[-1])


def environment() -> dict[str, str]:
    """Returns the environment variables of the compiler's process."""
    return {**{k: v for k, v in os.environ.items() if k in _INHERITED}, **_ENVIRONMENT}


def _parse_answer(answer: dict[str, Any], effort: float) -> Compiled:
    error = " ".join(answer.pop("error", "").split())
    if not error:
        return Compiled(**answer, effort=effort)
    needed = _NEEDED_MEMORY.search(error)
    number, unit = [group for group in needed.groups() if group] if needed else ("0", "K")
    return Compiled(
        **answer,
        error=error[:_MAX_MESSAGE],
        out_of_memory="RESOURCE_EXHAUSTED" in error and "emory" in error,
        peak_bytes=int(float(number) * _UNITS[unit]),
        effort=effort,
    )


@functools.cache
def find_python() -> list[str]:
    """Returns the command of a Python that has the compiler's packages; downloads them if necessary.

    Raises:
        UsageError: libtpu does not run on this machine.
        Failure: the environment cannot be made; the message names what is missing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UsageError(
            "--mode=aot_compile requires libtpu, which runs on Linux on x86-64, but this is "
            f"{sys.platform} on {platform.machine()}: run it there, for example in a container."
        )
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    uv = os.environ.get("UV") or shutil.which("uv", path=path)
    if not uv:
        raise Failure(f"{_NO_ENVIRONMENT}: uv is missing. Install it: pip install uv.")
    python = sys.executable if sys.version_info >= (3, 11) else _PYTHON
    options = ["--quiet", "--no-config", "--python", python]
    offline = [uv, "run", *options, "--no-project", "--offline", "--with-requirements", str(PINS)]
    offline += ["python"]
    if _call_uv([*offline, "-c", ""]):
        print("Making the TPU compiler's environment (once, about 300 MB).", flush=True)
        # Unlike `uv run`, this checks the hashes; what it leaves in uv's cache is used afterwards.
        with tempfile.TemporaryDirectory() as folder:
            pip = [uv, "pip", "install", *options, "--link-mode=symlink", f"--target={folder}"]
            error = _call_uv([*pip, "--require-hashes", f"--requirements={PINS}"])
        if error := error or _call_uv([*offline, "-c", ""]):
            raise Failure(
                f"{_NO_ENVIRONMENT}: uv failed ({error}). It requires the packages of "
                "ctl/modes/aot_compile/requirements.txt, from the network or from uv's cache."
            )
    return offline


def _call_uv(command: list[str]) -> str:
    """Returns the end of uv's error message, or "" if it succeeds."""
    clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, env=clean
        )
    except subprocess.TimeoutExpired:
        return f"its packages were not downloaded within {_DOWNLOAD_SECONDS:g} s"
    return (" ".join(done.stderr.split())[-300:] or "no message") if done.returncode else ""
