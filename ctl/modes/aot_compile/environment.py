"""Makes the compiler's own Python environment once, from ctl/modes/aot_compile/requirements.txt."""

from collections.abc import Iterator
import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

from ctl.errors import Failure, UsageError

PINS = pathlib.Path(__file__).with_name("requirements.txt")
_PYTHON = ">=3.11"  # jax 0.10 requires it
_TIMEOUT = 900.0  # seconds for a download of 300 MB


def ensure_python(cache: pathlib.Path | None = None) -> pathlib.Path:
    """Returns the environment's interpreter, and makes the environment if it does not exist.

    If several processes call this at the same time, one makes the environment and the others wait.

    Args:
        cache: the folder of the environments; the user's cache folder by default.

    Raises:
        UsageError: libtpu does not run on this machine, or the environment has other versions.
        Failure: the environment cannot be made; the message names what is missing.
    """
    _check_machine()
    cache = cache or _cache_folder()
    # Keyed by the content of the pins: other pins are another environment.
    folder = cache / f"aot-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not python.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _lock_file(cache / "aot.lock"):
                if not python.exists():
                    _make_environment(folder)
        except OSError as error:
            raise Failure(
                f"The compiler's environment cannot be made in {cache} ({error.strerror}): set "
                "XDG_CACHE_HOME to a writable folder."
            ) from error
    _check_versions(folder)
    return python


def read_pins() -> dict[str, str]:
    """Reads the pins: package -> version."""
    lines = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==", 1) for line in lines)


def _check_machine() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UsageError(
            "--mode=aot_compile requires libtpu, which runs on Linux on x86-64, but this is "
            f"{sys.platform} on {platform.machine()}: run it there, for example in a container."
        )


def _cache_folder() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "ctl"


@contextlib.contextmanager
def _lock_file(path: pathlib.Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # the kernel releases the lock when the process ends, in any way


def _make_environment(folder: pathlib.Path) -> None:
    """Makes the environment next to `folder` and renames it, so it is never partly made."""
    uv = _find_uv()
    print("Making the TPU compiler's environment (once, about 300 MB).", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as name:
        venv = pathlib.Path(name) / "venv"
        interpreter = sys.executable if sys.version_info >= (3, 11) else _PYTHON
        _run([*uv, "venv", "--quiet", "--no-config", "--python", interpreter, str(venv)])
        install = ["pip", "install", "--quiet", "--no-config", "--requirement", str(PINS)]
        _run([*uv, *install, "--python", f"{venv}/bin/python"])
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
        "The compiler's environment cannot be made: uv is missing. Install it: "
        "python3 -m pip install uv."
    )


def _run(command: list[str]) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, env=clean)
    except subprocess.TimeoutExpired:
        raise Failure(
            "The compiler's environment cannot be made: its packages were not downloaded within "
            f"{_TIMEOUT:g} s. Rerun the same command on a faster network."
        ) from None
    if done.returncode:
        message = " ".join(done.stderr.split())[-300:]
        raise Failure(
            f"The compiler's environment cannot be made: uv failed ({message}). It requires the "
            "packages of ctl/modes/aot_compile/requirements.txt, from the network or from uv's cache."
        )


def _check_versions(folder: pathlib.Path) -> None:
    sites = [str(site) for site in folder.glob("lib/python*/site-packages")]
    installed = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version
        for d in importlib.metadata.distributions(path=sites)
    }
    for package, version in read_pins().items():
        if installed.get(package) != version:
            raise UsageError(
                f"The compiler's environment {folder} has {package} {installed.get(package)}, but "
                f"requires {version}: delete the folder and rerun the same command, which makes it "
                "again."
            )
