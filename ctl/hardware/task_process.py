"""A process of a run, started on this machine."""

from collections.abc import Mapping, Sequence
import os
import signal
import sys
import tempfile

from ctl.hardware.child_process import ChildProcess
from ctl.hardware.cluster import Cluster

# An environment variable: the folder into which the process writes tracebacks.
TRACEBACK_FOLDER = "CTL_TRACEBACK_FOLDER"
STOPPED = 75  # exit code: stopped and saved, rerun the same command
# Exit codes of processes that end because another one has ended. A later code in this tuple is less
# likely to be the cause of the failure.
CONSEQUENCES = (128 + signal.SIGABRT, STOPPED)
_COLORS = (36, 33, 35, 32, 34, 31)  # ANSI foreground colors


class Process(ChildProcess):
    """Starts a process of a run, and prints its output line by line, after the name of its task.

    Args:
        task: the cluster, as this process sees it.
        command: the program and its arguments.
        environment: variables to set in addition to those of the current process.
        errors: error line -> name of the task that printed it first; shared by the processes that are
            started together.

    Attributes:
        reporter: the name of the task that printed the error of this process: another task if that
            one printed the same line before, else this task.
    """

    def __init__(
        self,
        task: Cluster,
        command: Sequence[str],
        environment: Mapping[str, str],
        errors: dict[str, str],
    ):
        self.task, self.reporter = task, task.name
        self._is_stopping = False
        label = _label(task)

        def print_line(line: str) -> None:
            # All processes report an error of the config; it is the same for all of them.
            if line.startswith("ctl: "):
                self.reporter = errors.setdefault(line, task.name)
                if self.reporter != task.name:
                    return
            print(f"{label} {line}", end="", flush=True)

        super().__init__(
            command, {TRACEBACK_FOLDER: tempfile.gettempdir(), **environment}, print_line
        )

    @property
    def exit_code(self) -> int | None:
        """The exit code, 128 + N after signal N as in shells; None while the process runs."""
        code = self.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def outcome(self) -> str:
        """How the process ended, such as "exit code 1" or "killed by SIGKILL"."""
        code = self.exit_code or 0
        return f"killed by {signal.Signals(code - 128).name}" if code > 128 else f"exit code {code}"

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Asks the process to save and stop; later calls have no effect.

        A second signal would end the process while it saves.
        """
        if not self._is_stopping:
            self._is_stopping = True
            self.send_signal(number)

    @property
    def ends_by_itself(self) -> bool:
        """False for the workers and servers of a chief, which serve it until they are stopped."""
        return not self.task.has_servers or self.task.role == "chief"


def rank_cause(exit_code: int) -> int:
    """Orders the failures of a run: the one with the smallest rank is the most likely cause.

    After one process has failed, the others exit with STOPPED, or TensorFlow aborts them. They may exit
    before the failed process, which may still be ending its threads. If another process was killed by a
    signal, a process may also exit with an error that it does not recognize as the loss of that process.
    Hence a signal ranks first, then other exit codes, then SIGABRT, then STOPPED.
    """
    if exit_code in CONSEQUENCES:
        return 2 + CONSEQUENCES.index(exit_code)
    return 0 if exit_code > 128 else 1


def _label(task: Cluster) -> str:
    label = f"[{task.name}]"
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        offset = 0 if task.role == "chief" else 1 + task.index + 3 * (task.role == "ps")
        label = f"\033[{_COLORS[offset % len(_COLORS)]}m{label}\033[0m"
    return label
