"""Starts the processes of a run on this machine.

    ctl launch --workers=2 -- --config=experiments/mnist_multi_worker.py

Each process runs `python -m ctl.main` with the arguments after `--`, and reads its task from TF_CONFIG.
Each line of output begins with the name of its process. The launcher names the process that fails
first, stops the others and exits with that process's code; with --max_restarts it restarts all
processes first. It passes Ctrl-C and SIGTERM on to the processes, which save and exit with code 75.

Slurm, MPI, Ray, Kubernetes and torchrun start processes on several machines, and restart them with
other numbers of workers: the documentation page "A cluster" has the command for each.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import math
import runpy
import signal
import sys
import tempfile
import time

from ctl.commands import Parser
from ctl.configs.flags import use_underscores
from ctl.errors import UsageError, count, printable
from ctl.hardware import cluster, gpu, rendezvous
from ctl.hardware.child_process import TRACEBACK_FOLDER, ChildProcess, pass_on, receive_signals
from ctl.hardware.cluster import Cluster

USER_ERROR = 2  # exit code: a restart would fail in the same way
STOPPED = 75  # exit code: stopped and saved, rerun the same command
# Exit codes of processes that end because another one has ended. A later code in this tuple is less
# likely to be the cause of the failure.
_CONSEQUENCES = (128 + signal.SIGABRT, STOPPED)
# Seconds in which processes must save and exit after SIGTERM. A process that waits for a lost one
# detects the loss after runtime.cluster.heartbeat_timeout, whose default is less, 30 s.
_STOP_TIMEOUT = 45.0
_CAUSE_TIMEOUT = 3.0  # seconds that a process may take to exit after others noticed its failure
_POLL = 0.1  # seconds
# Flag -> its least value, which is its default, and what it is.
_FLAGS = {
    "workers": (1, "worker processes"),
    "ps": (0, "parameter servers"),
    "max_restarts": (0, "restarts of all processes after failures"),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the launcher with the arguments of `ctl launch`.

    Returns:
        The exit code: 0 done, else the code of the process that failed first.

    Raises:
        UsageError: an argument is wrong, or this machine has fewer GPUs than workers.
    """
    form = "ctl launch --workers=2 -- CONFIG ARGUMENTS; see --help"
    parser = Parser("ctl launch", form, __doc__)
    for name, (least, text) in _FLAGS.items():
        parser.add_argument(f"--{name}", type=int, default=least, help=f"{text}; default {least}")
    parser.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="those of ctl.main")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = vars(parser.parse_args([*map(use_underscores, arguments[:end]), *arguments[end:]]))
    for name, (least, _) in _FLAGS.items():
        if flags[name] < least:
            raise UsageError(f"--{name} is {flags[name]}, but must be at least {least}.")
    command = [sys.executable, "-m", "ctl.main", *flags.pop("arguments")]
    return Launcher(lambda task: command, **flags).run()


class Process(ChildProcess):
    """A process of a run.

    Args:
        task: the cluster, as this process sees it.
        command: the program and its arguments.
        environment: variables to set in addition to those of the current process.

    Attributes:
        ends_by_itself: False for the workers and servers of a chief, which serve it until they are
            stopped.
    """

    def __init__(self, task: Cluster, command: Sequence[str], environment: Mapping[str, str]):
        super().__init__(task.name, command, environment)
        self.task = task
        self.ends_by_itself = not task.has_servers or task.role == "chief"

    @property
    def rank(self) -> int:
        """The rank of its failure among the failures of a run; the smallest is the most likely cause.

        After one process has failed, the others exit with STOPPED, or TensorFlow aborts them. They may
        exit before the failed process, which may still be ending its threads. If another process was
        killed by a signal, a process may also exit with an error that it does not recognize as the loss
        of that process. Hence a signal ranks first, then other exit codes, then SIGABRT, then STOPPED.
        """
        code = self.exit_code or 0
        return 2 + _CONSEQUENCES.index(code) if code in _CONSEQUENCES else int(code <= 128)


@dataclasses.dataclass
class Launcher:
    """Starts all processes of a run, waits for them, and restarts them after a failure.

    Args:
        command: returns the command line of a task; called each time the task is started.
        workers: the number of workers.
        ps: the number of parameter servers; with any, a chief is started, too.
        max_restarts: the number of restarts after failures.
    """

    command: Callable[[Cluster], Sequence[str]]
    workers: int
    ps: int = 0
    max_restarts: int = 0
    _signals: Sequence[int] = ()  # that this process has received
    _processes: list[Process] = dataclasses.field(default_factory=list)

    def run(self) -> int:
        """Runs all processes to their end.

        Returns:
            0 if the run is complete, else the exit code of the process that failed first.

        Raises:
            UsageError: this machine has fewer GPUs than workers.
        """
        with receive_signals() as self._signals:
            while failed := self._run_once():
                if not self.max_restarts or self._signals or failed.exit_code == USER_ERROR:
                    return failed.exit_code or 0
                self.max_restarts -= 1
                left = count(self.max_restarts, "more restart")
                _print(f"All processes have stopped. Restarting them; {left}.")
        return 0

    def _run_once(self) -> Process | None:
        """Runs the processes once; returns the one that failed first, or None."""
        with (
            # Until all processes have ended, so that another program cannot take a port meanwhile.
            rendezvous.reserve_ports(self.workers + self.ps + bool(self.ps)) as ports,
            # A process that is killed cannot delete its temporary files, such as those of AutoGraph.
            tempfile.TemporaryDirectory(prefix="ctl-", ignore_cleanup_errors=True) as folder,
        ):
            try:
                self._start(ports, folder)
                if failed := self._find_failure():
                    self._stop(failed)
                return failed
            finally:
                for process in self._processes:
                    process.kill()

    def _start(self, ports: Sequence[int], folder: str) -> None:
        self._processes = []
        gpus = gpu.list_uuids()  # again at each start, since a GPU may have been lost
        if gpus and self.workers > len(gpus):
            raise UsageError(
                f"--workers is {self.workers}, but this machine has {len(gpus)} GPUs: start at most "
                f"{len(gpus)} workers, or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU."
            )
        tasks = cluster.make_local_clusters(workers=self.workers, servers=self.ps, ports=ports)
        for task, share in zip(tasks, gpu.divide_among_processes(tasks, gpus), strict=True):
            environment = {
                "TF_CONFIG": task.tf_config(),
                "TMPDIR": folder,
                TRACEBACK_FOLDER: tempfile.gettempdir(),
                rendezvous.PORTS_BY_LAUNCHER: "1",
                **share,
            }
            self._processes.append(Process(task, self.command(task), environment))

    def _find_failure(self) -> Process | None:
        """Waits for the end of the run; returns the process that failed first, or None."""
        self._wait(lambda: not self._cause() and any(p.ends_by_itself for p in self._running()))
        # The cause may exit after the processes that noticed it.
        self._wait(lambda: (p := self._cause()) and p.rank > 1 and self._running(), _CAUSE_TIMEOUT)
        return self._cause()

    def _cause(self) -> Process | None:
        """Returns the process whose failure is the most likely cause of the others, if one failed."""
        failed = [p for p in self._processes if p.exit_code]
        # The chief of parameter servers continues as long as one worker is left.
        lost = [p for p in failed if p.task.has_servers and p.task.role == "worker"]
        causes = failed if len(lost) == self.workers else [p for p in failed if p not in lost]
        return min(causes, key=lambda p: p.rank, default=None)

    def _running(self) -> list[Process]:
        return [p for p in self._processes if p.exit_code is None]

    def _stop(self, failed: Process) -> None:
        """Names the process that failed first, stops the others, and waits until they have saved."""
        failed.kill()  # prints the rest of its output
        if not self._signals:
            names = {128 + number: f"killed by {number.name}" for number in signal.Signals}
            how = names.get(failed.exit_code or 0, f"exit code {failed.exit_code}")
            reason = f"{failed.name} failed first ({how}); see its last lines above"
            _print(f"{reason}. Stopping the other processes.")
            for process in self._running():
                process.stop()
        # A parameter server has nothing to save and does not stop by itself.
        self._wait(lambda: any(p.task.role != "ps" for p in self._running()), _STOP_TIMEOUT)

    def _wait(self, condition: Callable[[], object], timeout: float = math.inf) -> None:
        """Waits until a condition no longer holds, and passes on signals meanwhile."""
        deadline = time.monotonic() + timeout
        while condition() and time.monotonic() < deadline:
            is_second = len(self._signals) > 1
            pass_on(self._signals, [p for p in self._running() if is_second or p.ends_by_itself])
            time.sleep(_POLL)


def _print(text: str) -> None:
    # A closed stream must not end the processes before they have saved.
    with contextlib.suppress(OSError, ValueError):
        print(f"ctl.launch: {printable(text)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.argv.insert(1, "launch")
    runpy.run_module("ctl.main", run_name="__main__")
