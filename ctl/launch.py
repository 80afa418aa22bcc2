"""Starts the processes of a run on this machine.

    ctl launch --workers=2 -- --config=experiments/mnist_multi_worker.py

Each process runs `python -m ctl.main` with the arguments after `--`, and reads its task from TF_CONFIG.
Each line of output begins with the name of its process. The launcher names the process that fails
first, stops the others and exits with that process's code; with --max_restarts it restarts all
processes first. It passes Ctrl-C and SIGTERM on to the processes, which save and exit with code 75.

Slurm, MPI, Ray, Kubernetes and torchrun start processes on several machines, and restart them with
other numbers of workers: the documentation page "A cluster" has the command for each.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import signal
import sys
import tempfile
import time

from ctl.configs.flags import use_underscores
from ctl.errors import UsageError
from ctl.hardware import cluster, gpu, rendezvous
from ctl.hardware.child_process import TRACEBACK_FOLDER, ChildProcess, receive_signals
from ctl.hardware.cluster import Cluster

USER_ERROR = 2  # exit code: a restart would fail in the same way
STOPPED = 75  # exit code: stopped and saved, rerun the same command
# Exit codes of processes that end because another one has ended. A later code in this tuple is less
# likely to be the cause of the failure.
CONSEQUENCES = (128 + signal.SIGABRT, STOPPED)
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


def main(argv: Sequence[str]) -> int:
    """Runs the launcher.

    Args:
        argv: the command line, starting with the program's name.

    Returns:
        The exit code: 0 done, 2 user error, else the code of the process that failed first.
    """
    try:
        flags = vars(_parse(argv[1:]))
        command = [sys.executable, "-m", "ctl.main", *flags.pop("arguments")]
        return Launcher(lambda task: command, **flags).run()
    except UsageError as error:
        _print(" ".join(str(error).split()))
        return USER_ERROR


class Process(ChildProcess):
    """Starts a process of a run, and prints its output line by line, after the name of its task.

    Args:
        task: the cluster, as this process sees it.
        command: the program and its arguments.
        environment: variables to set in addition to those of the current process.

    Attributes:
        ends_by_itself: False for the workers and servers of a chief, which serve it until they are
            stopped.
    """

    def __init__(self, task: Cluster, command: Sequence[str], environment: Mapping[str, str]):
        self.task = task
        self.ends_by_itself = not task.has_servers or task.role == "chief"
        super().__init__(
            command, environment, lambda line: print(f"[{task.name}] {line}", end="", flush=True)
        )

    @property
    def exit_code(self) -> int | None:
        """The exit code, 128 + N after signal N as in shells; None while the process runs."""
        code = self.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def outcome(self) -> str:
        """How the process ended, such as "exit code 1" or "killed by SIGKILL"."""
        names = {128 + number: f"killed by {number.name}" for number in signal.Signals}
        return names.get(self.exit_code or 0, f"exit code {self.exit_code}")


class Launcher:
    """Starts all processes of a run, waits for them, and restarts them after a failure.

    Args:
        command: returns the command line of a task; called each time the task is started.
        workers: the number of workers.
        ps: the number of parameter servers; with any, a chief is started, too.
        max_restarts: the number of restarts after failures.
    """

    def __init__(
        self,
        command: Callable[[Cluster], Sequence[str]],
        *,
        workers: int,
        ps: int = 0,
        max_restarts: int = 0,
    ):
        self._command, self._workers, self._servers = command, workers, ps
        self._restarts = max_restarts
        self._signals: list[int] = []  # that this process has received
        self._processes: list[Process] = []
        self._lost: set[str] = set()  # the names of workers without which a chief continues
        self._is_stopping = False

    def run(self) -> int:
        """Runs all processes to their end.

        Returns:
            0 if the run is complete, else the exit code of the process that failed first.

        Raises:
            UsageError: this machine has fewer GPUs than workers.
        """
        with receive_signals() as self._signals:
            while failed := self._run_once():
                if not self._restarts_after(failed):
                    return failed.exit_code or 0
                self._restarts -= 1
                left = f"{self._restarts} more restart{'s' * (self._restarts != 1)}"
                _print(f"All processes have stopped. Restarting them; {left}.")
        return 0

    def _run_once(self) -> Process | None:
        """Runs the processes once; returns the one that failed first, or None."""
        count = self._workers + self._servers + bool(self._servers)
        with (
            # Until all processes have ended, so that another program cannot take a port meanwhile.
            rendezvous.reserve_ports(count) as ports,
            # A process that is killed cannot delete its temporary files, such as those of AutoGraph.
            tempfile.TemporaryDirectory(prefix="ctl-", ignore_cleanup_errors=True) as folder,
        ):
            try:
                self._start(ports, folder)
                failed = self._wait()
                if failed:
                    failed.drain()
                    self._report(failed)
                    self._stop()
                return failed
            finally:
                for process in self._processes:
                    process.kill()
                    process.drain()

    def _start(self, ports: Sequence[int], folder: str) -> None:
        self._processes, self._is_stopping = [], False
        gpus = gpu.list_uuids()  # again at each start, since a GPU may have been lost
        if gpus and self._workers > len(gpus):
            raise UsageError(
                f"--workers is {self._workers}, but this machine has {len(gpus)} GPUs: start at most "
                f"{len(gpus)} workers, or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU."
            )
        tasks = cluster.make_local_clusters(
            workers=self._workers, servers=self._servers, ports=ports
        )
        for task, share in zip(tasks, gpu.divide_among_processes(tasks, gpus), strict=True):
            environment = {
                "TF_CONFIG": task.tf_config(),
                "TMPDIR": folder,
                TRACEBACK_FOLDER: tempfile.gettempdir(),
                rendezvous.PORTS_BY_LAUNCHER: "1",
                **share,
            }
            self._processes.append(Process(task, self._command(task), environment))

    def _wait(self) -> Process | None:
        """Returns the process that failed first, or None once the run is complete."""
        deadline = None
        while True:
            self._pass_on_signals()
            failed = [p for p in self._processes if p.exit_code and not self._tolerates(p)]
            if failed:
                first = min(failed, key=_rank_cause)
                deadline = deadline or time.monotonic() + _CAUSE_TIMEOUT
                others_run = any(
                    p.exit_code is None and (p.ends_by_itself or not self._signals)
                    for p in self._processes
                )
                is_cause = first.exit_code not in CONSEQUENCES
                if is_cause or not others_run or time.monotonic() > deadline:
                    return first
            elif all(p.exit_code == 0 for p in self._processes if p.ends_by_itself):
                return None
            time.sleep(_POLL)

    def _tolerates(self, failed: Process) -> bool:
        """Returns whether the chief of parameter servers continues with other workers."""
        workers = [p for p in self._processes if p.task.has_servers and p.task.role == "worker"]
        if failed not in workers or all(p.exit_code for p in workers):
            return False
        name = failed.task.name
        if name not in self._lost:
            self._lost.add(name)
            _print(f"{name} is lost ({failed.outcome}); the chief continues with the others.")
        return True

    def _restarts_after(self, failed: Process) -> bool:
        return self._restarts > 0 and not self._signals and failed.exit_code != USER_ERROR

    def _report(self, failed: Process) -> None:
        """Names the process that failed first, before the others print that they stop."""
        if self._signals:
            return
        reason = f"{failed.task.name} failed first ({failed.outcome}); see its last lines above"
        _print(f"{reason}. Stopping the other processes.")

    def _stop(self) -> None:
        """Asks the processes to stop and waits; `_run_once` kills those that still run then."""
        if not self._signals:
            self._ask_to_stop(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_TIMEOUT
        # A parameter server has nothing to save and does not stop by itself.
        while time.monotonic() < deadline and any(
            p.exit_code is None for p in self._processes if p.task.role != "ps"
        ):
            self._pass_on_signals()
            time.sleep(_POLL)

    def _pass_on_signals(self) -> None:
        """Passes on a first signal, so that the run saves and stops; a second one kills it."""
        if len(self._signals) == 1:
            self._ask_to_stop(self._signals[0])
        elif self._signals:
            for process in self._processes:
                process.kill()

    def _ask_to_stop(self, number: int) -> None:
        # Once, because a second signal would end a process that saves.
        if not self._is_stopping:
            self._is_stopping = True
            for process in self._processes:
                if process.ends_by_itself or not self._signals:
                    process.send_signal(number)


def _rank_cause(process: Process) -> int:
    """Orders the failures of a run: the one with the smallest rank is the most likely cause.

    After one process has failed, the others exit with STOPPED, or TensorFlow aborts them. They may exit
    before the failed process, which may still be ending its threads. If another process was killed by a
    signal, a process may also exit with an error that it does not recognize as the loss of that process.
    Hence a signal ranks first, then other exit codes, then SIGABRT, then STOPPED.
    """
    code = process.exit_code or 0
    if code in CONSEQUENCES:
        return 2 + CONSEQUENCES.index(code)
    return 0 if code > 128 else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the launcher's flags; `arguments` are those of ctl.main."""
    parser = _Parser(prog="ctl launch", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, (least, text) in _FLAGS.items():
        parser.add_argument(f"--{name}", type=int, default=least, help=f"{text}; default {least}")
    parser.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="those of ctl.main")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = parser.parse_args([*map(use_underscores, arguments[:end]), *arguments[end:]])
    for name, (least, _) in _FLAGS.items():
        if getattr(flags, name) < least:
            raise UsageError(f"--{name} is {getattr(flags, name)}, but must be at least {least}.")
    return flags


class _Parser(argparse.ArgumentParser):
    """A parser that raises a UsageError instead of printing its usage and exiting."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(
            f"{message}: write ctl launch --workers=2 -- CONFIG ARGUMENTS; see --help."
        )


def _print(text: str) -> None:
    print(f"ctl.launch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
