"""Processes of the program that this process starts, and that do not outlive it.

Importing this module does not import TensorFlow.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

_PARENT = "CTL_PARENT"  # the process that waits for this one; read once, not by its own children
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ChildProcess:
    """A process in a process group of its own, whose output is passed on line by line."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
    ):
        """Starts the process.

        Args:
            command: the program and its arguments.
            environment: variables to set in addition to those of the current process.
            on_line: called from a thread with each line of output, which ends with a newline.
        """
        self._on_line = on_line
        self._popen = subprocess.Popen(
            command,
            env={**os.environ, **environment, _PARENT: str(os.getpid())},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # In the process group of this process, Ctrl-C would reach it a second time.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """The exit code, -N after signal N; None while the process runs."""
        return self._popen.poll()

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process if it still runs."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Kills the process and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def drain(self) -> None:
        """Waits until the rest of the output is passed on."""
        self._reader.join(timeout=5)

    def _read_output(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._on_line(line)


def stop_with_parent() -> None:
    """Lets this process save and stop if the one that started it as a `ChildProcess` dies.

    A process that is killed by SIGKILL cannot stop its children itself, and a run that goes on alone
    uses the devices, the ports and the folder that a new start requires. Call it in the main thread,
    before anything else. It has no effect in a process that the user has started, and requires Linux.
    """
    parent = os.environ.pop(_PARENT, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    # The signal of loop/stop.py. A process that a thread starts gets it when that thread ends, so the
    # main thread of the parent must start it.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it has died before
        os.kill(os.getpid(), signal.SIGTERM)
