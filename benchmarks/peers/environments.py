"""The virtual environments of the frameworks, outside of ctl's own."""

from collections.abc import Sequence
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
OWN = ""  # ctl's own environment

# Releases of November 2026. TensorFlow is that of ctl's own environment.
# PyTorch: pip also takes a build for CPUs of this version from PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL;
# the one of the package index brings CUDA (5 GB), and trains on the CPU, too.
_PACKAGES = {
    "keras": ("keras==3.15.1",),
    "jax": ("jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "keras==3.15.1"),
    "torch": ("torch==2.13.0", "numpy"),
}
_VERSIONS = """
import importlib.metadata, json, sys
found = {name: [*importlib.metadata.distributions(name=name)] for name in sys.argv[1:]}
print(json.dumps({name: each[0].version for name, each in found.items() if each}))
"""


def python(cache: pathlib.Path, name: str) -> str:
    """Returns the Python of an environment; installs the environment if it is missing.

    Args:
        cache: the folder of the environments.
        name: name of the environment, or `OWN`.
    """
    if name == OWN:
        return sys.executable
    folder = cache / name
    path = folder / "bin" / "python"
    packages = [*_PACKAGES[name], *(_own_tensorflow() if name == "keras" else [])]
    wanted, done = "\n".join(packages), folder / "packages.txt"
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([path, "-m", "pip", "install", "--quiet", *packages], check=True)
        done.write_text(wanted)
    return str(path)


def _own_tensorflow() -> list[str]:
    """Returns the requirement of the TensorFlow that this process has."""
    found = versions(sys.executable, ["tensorflow-cpu", "tensorflow"])
    return [f"{name}=={version}" for name, version in found.items()][:1]


def versions(interpreter: str, names: Sequence[str]) -> dict[str, str]:
    """Returns the versions of the packages that an environment has."""
    command = [interpreter, "-c", _VERSIONS, *names]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def place() -> dict[str, Any]:
    """Returns the folder and the environment variables of a program, as for `subprocess`."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {"cwd": ROOT, "env": {**os.environ, **variables}}
