"""Starts and supervises the processes of a run on one machine."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import os
import signal
import sys
import tempfile
import time
from types import FrameType

from ctl.hardware import cluster, gpu, rendezvous
from ctl.hardware.child_process import ChildProcess
from ctl.hardware.cluster import Cluster
from ctl.hardware.elastic import FailureLimit, WorkerPool

# Environment variables that decide what a user's code imports.
KERAS = ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND")
# An environment variable: the folder into which a process writes tracebacks.
TRACEBACK_FOLDER = "CTL_TRACEBACK_FOLDER"
USER_ERROR = 2  # exit code: a restart would fail in the same way
STOPPED = 75  # exit code: stopped and saved, rerun the same command
# Exit codes of processes that end because another one has ended. A later code in this tuple is less
# likely to be the cause of the failure.
CONSEQUENCES = (128 + signal.SIGABRT, STOPPED)
# Seconds in which processes must save and exit after SIGTERM. A process that waits for a lost one
# detects the loss after runtime.cluster.heartbeat_timeout, whose default is less, 30 s.
_STOP_TIMEOUT = 45.0
_RESIZE_TIMEOUT = 300.0  # as above, if the number of workers changes: the run requires this save
_CAUSE_TIMEOUT = 3.0  # seconds that a process may take to exit after others noticed its failure
_POLL = 0.1  # seconds
_REPORT_AFTER = 5.0  # seconds of waiting
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
        names = {128 + number: number.name for number in signal.Signals}
        return f"killed by {names[code]}" if code in names else f"exit code {code}"

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


class Launcher:
    """Starts all processes of a run, waits for them, and restarts them after a failure.

    Args:
        command: returns the command line of a task; called each time the task is started.
        workers: the number of workers.
        servers: the number of parameter servers; with any, a chief is started, too.
        max_restarts: the number of restarts after failures.
        pool: determines how many of the workers can run; by default all of them.
        failure_limit: detects failures after which a restart does not help; None for no limit.
        wait_seconds: how long to wait until enough workers can run.
    """

    def __init__(
        self,
        command: Callable[[Cluster], Sequence[str]],
        *,
        workers: int,
        servers: int = 0,
        max_restarts: int = 0,
        pool: WorkerPool | None = None,
        failure_limit: FailureLimit | None = None,
        wait_seconds: float = 0.0,
    ):
        self._command = command
        self._workers, self._servers = workers, servers
        self._restarts = max_restarts
        self._pool = pool or WorkerPool(workers)
        self._failure_limit = failure_limit
        self._wait_seconds = wait_seconds
        self._processes: list[Process] = []
        self._lost: list[Process] = []
        self._received: signal.Signals | None = None
        self._is_resizing = False
        self._gpus: dict[str, dict[str, str]] = {}
        self._errors: dict[str, str] = {}
        self._temporary = ""
        self._reserved = contextlib.ExitStack()  # holds the ports

    def run(self) -> int:
        """Runs all processes to their end.

        Returns:
            0 if the run is complete, else the exit code of the first failed process, or 75 if
            it was stopped while no process ran.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward_signal)
        code, number_before = STOPPED, self._workers
        while slots := self._wait_for_slots():
            if len(slots) != number_before:
                _print(f"continuing with {len(slots)} of {self._workers} workers.")
            number_before = len(slots)
            # A process that is killed cannot delete its temporary files, such as those of AutoGraph.
            with tempfile.TemporaryDirectory(prefix="ctl-", ignore_cleanup_errors=True) as folder:
                self._temporary = folder
                if self._failure_limit:
                    self._failure_limit.record_start()
                failed = self._run_once(slots)
            if failed is None:
                return 0
            code = failed.exit_code or 0
            if self._received or not self._continues(failed, slots):
                return code
        return STOPPED if self._received else code

    def _wait_for_slots(self) -> list[int]:
        """Returns the slots to use; [] if there are too few after `wait_seconds`, or after a signal."""
        slots, start, is_reported = self._pool.slots(), time.monotonic(), False
        too_few = f"fewer than {self._pool.minimum} workers can run"
        while not slots and not self._received:
            seconds = time.monotonic() - start
            if seconds > self._wait_seconds:
                _print(f"{too_few}: rerun the same command later.")
                break
            if seconds > _REPORT_AFTER and not is_reported:
                is_reported = True
                _print(f"{too_few}; waiting for them, up to {self._wait_seconds:.0f} s.")
            time.sleep(_POLL)
            slots = self._pool.slots()
        return [] if self._received else slots

    def _continues(self, failed: Process, slots: Sequence[int]) -> bool:
        """Returns whether to start the run again after a process has ended it."""
        code = failed.exit_code or 0
        if self._failure_limit and self._failure_limit.has_begun():
            self._pool.accept(len(slots))
        if code == USER_ERROR:
            if not self._pool.reject(len(slots)):
                return False
            _print(f"the run cannot have {len(slots)} workers; trying another number.")
            return True
        if self._stopped_to_resize(failed):
            return True
        if not self._restarts:
            return False
        is_killed = code > 128
        if is_killed and failed.task.role == "worker":
            self._pool.lose(slots[failed.task.index])
        is_loss = is_killed or code == STOPPED
        if self._failure_limit and self._failure_limit.is_reached(is_loss=is_loss):
            _print(
                "not restarted: the run fails again and again without a new checkpoint. Fix what its "
                "last lines report, then rerun the same command."
            )
            return False
        self._restarts -= 1
        _print(f"restarting all processes; {self._restarts} more restarts.")
        return True

    def _stopped_to_resize(self, process: Process) -> bool:
        # The signal itself ends a process in which Python is still starting.
        return self._is_resizing and process.exit_code in (STOPPED, 128 + signal.SIGTERM)

    def _run_once(self, slots: Sequence[int]) -> Process | None:
        """Runs the processes once; returns the one that failed first, or None."""
        self._is_resizing = False
        try:
            self._start_all(slots)
            failed = self._wait(slots)
            if failed is None:
                return None
            failed.drain()
            if not self._received and not self._stopped_to_resize(failed):
                _print(
                    f"{failed.reporter} failed first ({failed.outcome}); stopping the other "
                    "processes. Its last lines are above."
                )
            self._stop_all()
            return failed
        finally:
            for process in self._processes:
                process.kill()
                process.drain()
            self._reserved.close()

    def _start_all(self, slots: Sequence[int]) -> None:
        self._processes, self._errors = [], {}
        gpus = self._pool.gpus or gpu.list_uuids()
        # A slot keeps the GPUs that it has when all workers run: those of a lost worker are not used.
        all_tasks = self._make_tasks(self._workers)
        shares = gpu.divide_among_processes(all_tasks, gpus)
        share_of = {task.name: share for task, share in zip(all_tasks, shares, strict=True)}
        tasks = self._make_tasks(len(slots))
        for task in tasks:
            is_worker = task.role == "worker"
            place = cluster.task_name("worker", slots[task.index]) if is_worker else task.name
            self._gpus[task.name] = share_of[place]
            self._processes.append(self._start(task))
        if self._received:  # while they were started
            self._forward()

    def _make_tasks(self, workers: int) -> list[Cluster]:
        count = workers + self._servers + (1 if self._servers else 0)
        # Until all processes have ended, so that another program cannot take a port of one that starts.
        ports = self._reserved.enter_context(rendezvous.reserve_ports(count))
        return cluster.make_local_clusters(workers=workers, servers=self._servers, ports=ports)

    def _start(self, task: Cluster) -> Process:
        environment = {
            "TF_CONFIG": task.tf_config(),
            "TMPDIR": self._temporary,
            rendezvous.PORTS_BY_LAUNCHER: "1",
            **self._gpus[task.name],
        }
        return Process(task, self._command(task), environment, self._errors)

    def _wait(self, slots: Sequence[int]) -> Process | None:
        """Returns the process that failed first, or None once the run is complete."""
        deadline = None
        while True:
            failed = [p for p in self._processes if p.exit_code and not self._tolerates(p)]
            failed.sort(key=lambda p: _rank_cause(p.exit_code or 0))
            if failed:
                deadline = deadline or time.monotonic() + _CAUSE_TIMEOUT
                others_run = any(
                    p.exit_code is None and (p.ends_by_itself or not self._received)
                    for p in self._processes
                )
                is_cause = failed[0].exit_code not in CONSEQUENCES
                if is_cause or not others_run or time.monotonic() > deadline:
                    return failed[0]
            elif all(p.exit_code == 0 for p in self._processes if p.ends_by_itself):
                return None
            else:
                self._resize_if_due(slots)
            time.sleep(_POLL)

    def _resize_if_due(self, slots: Sequence[int]) -> None:
        """Stops the run, which then saves, if it can have more workers or must have fewer."""
        if self._is_resizing or self._received or not self._pool.must_change(slots):
            return
        # Without this condition, a run whose number of workers changes often would never train.
        if self._failure_limit and not self._failure_limit.has_saved():
            return
        self._is_resizing = True
        number = len(self._pool.slots())
        if number:
            _print(
                f"{number} workers can run, not {len(slots)}: the run saves, to continue with them."
            )
        else:
            _print(f"fewer than {self._pool.minimum} workers can run: the run saves and stops.")
        for process in self._processes:
            process.stop()

    def _tolerates(self, failed: Process) -> bool:
        """Returns whether the run continues without a failed process, which is restarted if possible.

        The chief of parameter servers continues as long as one of its workers is left.
        """
        workers = [p for p in self._processes if p.task.has_servers and p.task.role == "worker"]
        if failed not in workers or all(p.exit_code for p in workers):
            return False
        if failed in self._lost:
            return True
        self._lost.append(failed)
        name = failed.task.name
        if not self._restarts:
            _print(f"{name} is lost ({failed.outcome}); the chief continues with the others.")
            return True
        self._restarts -= 1
        _print(f"{name} is lost ({failed.outcome}); restarting it; {self._restarts} more restarts.")
        self._processes[self._processes.index(failed)] = self._start(failed.task)
        return True

    def _stop_all(self) -> None:
        """Asks the processes to stop and waits; `_run_once` kills those that still run then."""
        for process in self._processes:
            if not self._received:
                process.stop()
        is_saving = self._is_resizing and all(
            p.exit_code in (None, 0, STOPPED) for p in self._processes
        )
        deadline = time.monotonic() + (_RESIZE_TIMEOUT if is_saving else _STOP_TIMEOUT)
        # A parameter server has nothing to save and does not stop by itself.
        while time.monotonic() < deadline and any(
            p.exit_code is None for p in self._processes if p.task.role != "ps"
        ):
            time.sleep(_POLL)

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        """Forwards a first signal, so that the run saves and stops; a second one kills it."""
        repeated = self._received is not None
        self._received = signal.Signals(number)
        if repeated:
            for process in self._processes:
                process.kill()
        else:
            self._forward()

    def _forward(self) -> None:
        assert self._received is not None
        for process in self._processes:
            if process.ends_by_itself:
                process.stop(self._received)


def _print(text: str) -> None:
    print(f"ctl.launch: {text}", file=sys.stderr, flush=True)


def _rank_cause(exit_code: int) -> int:
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
