"""Runs Python in a child process, to test other devices, exit codes, signals and output."""

from collections.abc import Callable, Sequence
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

from ctl.hardware import rendezvous
from tests.support import fork_server

PYTHON = sys.executable
# Programs that import TensorFlow in any case: they run in a fork of a process that has imported it.
PROGRAMS = """
    ctl.main pytest tests.support.faults benchmarks.uneven_split tests.end_to_end.mistakes_test
    tests.end_to_end.killed_ports_test
"""
FORKED = set(PROGRAMS.split())
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
ROOT = pathlib.Path(__file__).resolve().parents[2]
# TensorFlow 2.21 prints this when it is imported; no environment variable hides it.
IMPORT_LINES = re.compile(
    r"(WARNING: All log messages before absl.*\n)?I0000 .* oneDNN custom .*\n"
)


def environment(**variables: str) -> dict[str, str]:
    """Returns this process' environment without pytest's and TensorFlow's variables.

    The project can be imported from any working directory.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV_", "TF_"))}
    return {**inherited, "PYTHONPATH": str(ROOT), **variables}


def wait_for(condition: Callable[[], Any], seconds: float = 300) -> Any:
    """Waits until a condition is true; returns its value, and fails after some seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def find_free_ports(count: int) -> list[int]:
    """Returns ports of this machine at which no process listens at present."""
    with rendezvous.reserve_ports(count) as ports:
        return ports


def run(
    arguments: Sequence[str],
    *,
    cwd: pathlib.Path = ROOT,
    timeout: float = 600,
    fresh: bool = False,
    fork: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` until it exits; kills its process group if an exception is raised.

    The standard error that it returns is without `IMPORT_LINES`.
    """
    with start(arguments, cwd=cwd, fresh=fresh, fork=fork, **variables) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    stderr = IMPORT_LINES.sub("", stderr)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start(
    arguments: Sequence[str],
    *,
    cwd: pathlib.Path = ROOT,
    fresh: bool = False,
    fork: bool = False,
    **variables: str,
) -> subprocess.Popen[str]:
    """Starts `python *arguments` in a new process group, with its output piped as text.

    Args:
        arguments: the arguments of Python. `-m` and a module of `FORKED` runs in a fork.
        cwd: the working directory.
        fresh: start a new process in any case, to test what depends on the import of TensorFlow.
        fork: run `-c` and code in a fork, too; of TensorFlow's variables, it reads TF_CONFIG.
        **variables: environment variables; with any of TensorFlow's, the process is new.
    """
    fresh = fresh or any(name.startswith(("TF_", "XLA_", "CUDA_")) for name in variables)
    is_forked = fork or (arguments[0] == "-m" and arguments[1] in FORKED and not fresh)
    popen = fork_server.Popen if is_forked else subprocess.Popen
    return popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**variables),
        stdin=subprocess.PIPE if is_forked else None,
        start_new_session=True,
        **PIPES,
    )
