"""Runs Python in a process of its own: for other devices, exit codes, signals, and what is printed."""

from collections.abc import Sequence
import os
import pathlib
import signal
import subprocess
import sys

PYTHON = sys.executable
ROOT = pathlib.Path(__file__).resolve().parent.parent


def environment(**variables: str) -> dict[str, str]:
    """This process' environment, with the project importable and without pytest's own settings."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV_", "TF_"))}
    return {**inherited, "PYTHONPATH": str(ROOT), **variables}


def run(
    arguments: Sequence[str], *, cwd: pathlib.Path = ROOT, timeout: float = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` to its end; the caller looks at returncode, stdout and stderr."""
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
    """Starts `python *arguments` in a process group of its own, its output piped as text."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
