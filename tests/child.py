"""Runs Python in a child process, to test other devices, exit codes, signals and output."""

from collections.abc import Sequence
import os
import pathlib
import signal
import subprocess
import sys

PYTHON = sys.executable
ROOT = pathlib.Path(__file__).resolve().parent.parent


def environment(**variables: str) -> dict[str, str]:
    """Returns this process' environment without pytest's and TensorFlow's variables.

    The project can be imported from any working directory.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV_", "TF_"))}
    return {**inherited, "PYTHONPATH": str(ROOT), **variables}


def run(
    arguments: Sequence[str], *, cwd: pathlib.Path = ROOT, timeout: float = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` until it exits; kills its process group if an exception is raised."""
    with start(arguments, cwd=cwd, **variables) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start(
    arguments: Sequence[str], *, cwd: pathlib.Path = ROOT, **variables: str
) -> subprocess.Popen[str]:
    """Starts `python *arguments` in a new process group, with its output piped as text."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
