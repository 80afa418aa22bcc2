"""Runs the compiler in its own environment and process, and reads its result.

The environment is made once, from ctl/modes/aot_compile/requirements.txt.
"""

import dataclasses
import fcntl
import hashlib
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
from ctl.modes.aot_compile.slices import Slice

QUICK, DEFAULT = -1.0, 0.0
# The quick effort can need more memory than the default one, so a program that needs more than
# this part of the memory is compiled again at the default effort.
NEAR_LIMIT = 0.85
PINS = pathlib.Path(__file__).with_name("requirements.txt")
_PYTHON = ">=3.11"  # jax 0.10 requires it
_DOWNLOAD_SECONDS = 900.0  # for a download of 300 MB
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


def compile_program(hlo: bytes, slice_: Slice) -> Compiled:
    """Compiles a program for a slice: quickly, and again at the default effort near the limit.

    Args:
        hlo: the program of one replica, a serialized HLO module.
        slice_: the slice to compile for.

    Raises:
        UsageError: libtpu does not run on this machine.
        Failure: the environment cannot be made, or its packages have the wrong versions.
    """
    quick = compile_once(hlo, slice_, effort=QUICK)
    if not quick.out_of_memory and quick.peak_bytes <= NEAR_LIMIT * slice_.hbm_bytes:
        return quick
    slow = compile_once(hlo, slice_, effort=DEFAULT)
    return dataclasses.replace(slow, seconds=round(quick.seconds + slow.seconds, 2))


def compile_once(hlo: bytes, slice_: Slice, *, effort: float) -> Compiled:
    """Compiles a program once, at one effort; see `compile_program` for the other arguments."""
    python = ensure_python()
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
        answer = _run([str(python), str(_COMPILER), str(folder / "request.json")], folder)
    return _parse_answer(answer, effort)


def _run(command: list[str], folder: pathlib.Path) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "HOME": str(folder), **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MAX_SECONDS,
        )
    except subprocess.TimeoutExpired:
        limit = f"the compiler was stopped after {_MAX_SECONDS:g} s, its limit"
        return {"error": limit, "kind": "limits"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        message = " ".join(done.stderr.split())[-_MAX_MESSAGE:] or "no message"
        return {"error": f"the compiler ended with exit code {done.returncode}: {message}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


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


def ensure_python() -> pathlib.Path:
    """Returns the environment's interpreter, and makes the environment if it does not exist.

    If several processes call this at the same time, one makes the environment and the others wait.

    Raises:
        UsageError: libtpu does not run on this machine.
        Failure: the environment cannot be made; the message names what is missing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UsageError(
            "--mode=aot_compile requires libtpu, which runs on Linux on x86-64, but this is "
            f"{sys.platform} on {platform.machine()}: run it there, for example in a container."
        )
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "ctl"
    # Keyed by the content of the pins: other pins are another environment.
    folder = cache / f"aot-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not python.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / "aot.lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, in any way
                if not python.exists():
                    _make_environment(folder)
        except OSError as error:
            raise Failure(
                f"The compiler's environment cannot be made in {cache} ({error.strerror}): set "
                "XDG_CACHE_HOME to a writable folder."
            ) from error
    return python


def _make_environment(folder: pathlib.Path) -> None:
    """Makes the environment next to `folder` and renames it, so it is never partly made."""
    uv = _find_uv()
    print("Making the TPU compiler's environment (once, about 300 MB).", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as name:
        venv = pathlib.Path(name) / "venv"
        interpreter = sys.executable if sys.version_info >= (3, 11) else _PYTHON
        _run_uv([*uv, "venv", "--quiet", "--no-config", "--python", interpreter, str(venv)])
        install = ["pip", "install", "--quiet", "--no-config", "--requirement", str(PINS)]
        _run_uv([*uv, *install, "--python", f"{venv}/bin/python"])
        venv.rename(folder)


def _find_uv() -> list[str]:
    executable = os.environ.get("UV") or shutil.which("uv")
    if executable:
        return [executable]
    for interpreter in (sys.executable, getattr(sys, "_base_executable", sys.executable)):
        command = [interpreter, "-m", "uv"]
        if subprocess.run([*command, "--version"], capture_output=True).returncode == 0:
            return command
    raise Failure(
        "The compiler's environment cannot be made: uv is missing. Install it: pip install uv."
    )


def _run_uv(command: list[str]) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, env=clean
        )
    except subprocess.TimeoutExpired:
        raise Failure(
            "The compiler's environment cannot be made: its packages were not downloaded within "
            f"{_DOWNLOAD_SECONDS:g} s. Rerun the same command on a faster network."
        ) from None
    if done.returncode:
        message = " ".join(done.stderr.split())[-300:]
        raise Failure(
            f"The compiler's environment cannot be made: uv failed ({message}). It requires the "
            "packages of ctl/modes/aot_compile/requirements.txt, from the network or from uv's cache."
        )
