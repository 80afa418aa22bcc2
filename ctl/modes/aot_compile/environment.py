"""The compiler's own Python environment, made once from ctl/modes/aot_compile/requirements.txt.

Loads no TensorFlow.
"""

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
_PYTHON = ">=3.11"  # jax 0.10 has none for older ones
_PATIENCE = 900.0  # seconds for 300 MB to come


def python(cache: pathlib.Path | None = None) -> pathlib.Path:
    """The interpreter of the environment, which is made if it is not there yet.

    Several processes may ask at once: one makes it, the others wait.

    Args:
        cache: the folder that holds the environments; the user's cache folder if not given.

    Raises:
        UsageError: this machine cannot have it, or what is there has other versions.
        Failure: it cannot be made; one line says what is missing.
    """
    _check_machine()
    cache = cache or _cache()
    # The text decides, not the time: other pins are another environment.
    folder = cache / f"aot-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]}"
    found = folder / "bin" / "python"
    if not found.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(cache / "aot.lock"):
                if not found.exists():
                    _make(folder)
        except OSError as error:
            raise Failure(
                f"The compiler's environment cannot be made in {cache} ({error.strerror}): set "
                "XDG_CACHE_HOME to a folder that can be written."
            ) from error
    _check_versions(folder)
    return found


def pins() -> dict[str, str]:
    """Package -> version, of the file of pins."""
    lines = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==", 1) for line in lines)


def _check_machine() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UsageError(
            f"--mode=aot_compile needs libtpu, which is for Linux on x86-64, and this is {sys.platform} "
            f"on {platform.machine()}: run it there, such as in a container."
        )


def _cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "ctl"


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # the system lets go of it with the process, however that ends


def _make(folder: pathlib.Path) -> None:
    """Makes it beside its place and moves it there, so that half of one is never used."""
    uv = _uv()
    print("Making the TPU compiler's environment (once, about 300 MB).", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as name:
        made = pathlib.Path(name) / "venv"
        _run([*uv, "venv", "--quiet", "--no-config", "--python", _interpreter(), str(made)])
        install = ["pip", "install", "--quiet", "--no-config", "--requirement", str(PINS)]
        _run([*uv, *install, "--python", f"{made}/bin/python"])
        made.rename(folder)


def _interpreter() -> str:
    return sys.executable if sys.version_info >= (3, 11) else _PYTHON


def _uv() -> list[str]:
    own = os.environ.get("UV") or shutil.which("uv")
    if own:
        return [own]
    for interpreter in (sys.executable, getattr(sys, "_base_executable", sys.executable)):
        asked = [interpreter, "-m", "uv"]
        if subprocess.run([*asked, "--version"], capture_output=True).returncode == 0:
            return asked
    raise Failure(
        "The compiler's environment cannot be made: uv is missing. Install it: "
        "python3 -m pip install uv."
    )


def _run(command: list[str]) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, env=clean)
    except subprocess.TimeoutExpired:
        raise Failure(
            f"The compiler's environment cannot be made: {_PATIENCE:g} s were not enough to fetch its "
            "packages. Run it again where the network is faster."
        ) from None
    if done.returncode:
        told = " ".join(done.stderr.split())[-300:]
        raise Failure(
            f"The compiler's environment cannot be made: uv failed ({told}). It needs the packages of "
            "ctl/modes/aot_compile/requirements.txt, from the network or from uv's cache."
        )


def _check_versions(folder: pathlib.Path) -> None:
    sites = [str(site) for site in folder.glob("lib/python*/site-packages")]
    installed = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version
        for d in importlib.metadata.distributions(path=sites)
    }
    for package, version in pins().items():
        if installed.get(package) != version:
            raise UsageError(
                f"The compiler's environment {folder} has {package} {installed.get(package)}, want "
                f"{version}: delete the folder, and it is made again."
            )
