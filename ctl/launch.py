"""Starts the processes of a run on this machine, and looks after them.

    python -m ctl.launch --workers=2 -- --config=experiments/mnist_multi_worker.py

Each is `python -m ctl.main` with the arguments after `--` and its place in TF_CONFIG. Their output comes
with their names before it. The first that fails is told, the rest are stopped, and its exit code is
this program's; with --max_restarts all are started again first. Loads no TensorFlow.
"""

import argparse
from collections.abc import Mapping, Sequence
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

from ctl.errors import UsageError
from ctl.hardware import cluster, gpu
from ctl.hardware.cluster import Cluster

AGAIN = 75  # of the program's exit codes: run me again
MISTAKE = 2  # no restart mends it
_GRACE = 30.0  # seconds that processes have to stop, once asked
_COLOURS = (36, 33, 35, 32, 34, 31)
_KEPT = 30  # last lines of a process that are told again when it fails


class Process:
    """One process of the run, its output passed on line by line."""

    def __init__(self, place: Cluster, command: Sequence[str], environment: Mapping[str, str]):
        """Starts it, in a process group of its own, so that a signal reaches it once."""
        self.place = place
        self.lines: list[str] = []
        self._popen = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """Its exit code, or None while it runs; of a signal 128 + its number, as shells have it."""
        found = self._popen.poll()
        return found if found is None or found >= 0 else 128 - found

    def signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Ends it and what it started."""
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._popen.wait()

    def drain(self) -> None:
        """Waits for the rest of its output."""
        self._reader.join(timeout=5)

    def _pass_on(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.lines = [*self.lines[1 - _KEPT :], line]
            print(_prefixed(self.place, line), end="", flush=True)


class Launcher:
    """Starts all processes, waits for them, and starts them again where that may help."""

    def __init__(self, *, workers: int, servers: int, max_restarts: int, arguments: Sequence[str]):
        """Takes what to start.

        Args:
            workers: how many workers.
            servers: how many parameter servers.
            max_restarts: how often to start again after a failure.
            arguments: of `ctl.main`.
        """
        self._workers, self._servers = workers, servers
        self._restarts = max_restarts
        self._arguments = arguments
        self._processes: list[Process] = []
        self._lost: list[Process] = []
        self._received: signal.Signals | None = None
        self._own: dict[str, dict[str, str]] = {}

    def run(self) -> int:
        """Runs to the end.

        Returns:
            0 if the run is done, else the exit code of the process that failed first.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)
        while True:
            code = self._once()
            if code in (0, MISTAKE) or self._received or not self._restarts:
                return code
            self._restarts -= 1
            _tell(f"starting all again; {self._restarts} more restarts.")

    def _once(self) -> int:
        self._processes = self._start()
        try:
            failed = self._wait()
            if failed is None:
                return 0
            code = failed.code or 0
            if not self._received:
                _tell(_obituary(failed))
            self._stop()
            return code
        finally:
            for process in self._processes:
                process.kill()
                process.drain()

    def _start(self) -> list[Process]:
        count = self._workers + self._servers + (1 if self._servers else 0)
        places = cluster.local(
            workers=self._workers, servers=self._servers, ports=cluster.free_ports(count)
        )
        gpus = gpu.divide_among_processes(places, gpu.list_gpus(os.environ))
        self._own = {place.name: own for place, own in zip(places, gpus, strict=True)}
        return [self._begin(place) for place in places]

    def _begin(self, place: Cluster) -> Process:
        command = [sys.executable, "-m", "ctl.main", *self._arguments]
        return Process(place, command, {"TF_CONFIG": place.tf_config(), **self._own[place.name]})

    def _wait(self) -> Process | None:
        """The first process that failed; None when all that have an end have ended well."""
        while True:
            failed = [p for p in self._processes if p.code and not self._spared(p)]
            # Of several that went at once, one that was lost for another's sake is not the first.
            failed.sort(key=lambda p: p.code == AGAIN)
            if failed:
                return failed[0]
            if all(p.code == 0 for p in self._processes if _has_an_end(p.place)):
                return None
            time.sleep(0.1)

    def _spared(self, process: Process) -> bool:
        """Whether the chief goes on without this process: a worker of parameter servers.

        Where restarts are left it is started again, and joins.
        """
        workers = [p for p in self._processes if p.place.has_servers and p.place.role == "worker"]
        if process not in workers or all(p.code for p in workers):
            return False
        if process in self._lost:
            return True
        again = "" if self._restarts else "; the chief goes on with the others"
        _tell(f"{process.place.name} has gone ({_how(process)}){again}.")
        self._lost.append(process)
        if self._restarts:
            self._restarts -= 1
            _tell(f"starting {process.place.name} again; {self._restarts} more restarts.")
            self._processes[self._processes.index(process)] = self._begin(process.place)
        return True

    def _stop(self) -> None:
        """Asks the rest to stop, and kills what does not."""
        for process in self._processes:
            if not self._received:
                process.signal(signal.SIGTERM)
        end = time.monotonic() + _GRACE
        while time.monotonic() < end and any(
            p.code is None for p in self._processes if p.place.role != "ps"
        ):
            time.sleep(0.1)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        again = self._received is not None
        self._received = signal.Signals(number)
        for process in self._processes:
            if again:
                process.kill()
            elif _has_an_end(process.place):
                process.signal(number)


def main(argv: Sequence[str]) -> int:
    """Runs the program.

    Args:
        argv: the command line, the program's name first.

    Returns:
        The exit code: 0 done, 2 a mistake, else that of the process that failed first.
    """
    own, dashes, arguments = _split(list(argv[1:]))
    try:
        flags = _flags(own)
        if not dashes or not arguments:
            raise UsageError(
                "Nothing to run: add `-- --config=FILE`, the arguments of ctl.main after the two "
                "dashes."
            )
        _check_gpus(flags.workers)
    except UsageError as error:
        print("ctl.launch:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        return MISTAKE
    return Launcher(
        workers=flags.workers,
        servers=flags.ps,
        max_restarts=flags.max_restarts,
        arguments=arguments,
    ).run()


def _split(arguments: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in arguments:
        return arguments, False, []
    cut = arguments.index("--")
    return arguments[:cut], True, arguments[cut + 1 :]


def _flags(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m ctl.launch", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", type=int, default=1, help="worker processes; default 1")
    parser.add_argument("--ps", type=int, default=0, help="parameter servers; default none")
    parser.add_argument("--max_restarts", type=int, default=0, help="after a failure; default 0")
    flags = parser.parse_args(arguments)
    for name, least in (("workers", 1), ("ps", 0), ("max_restarts", 0)):
        if getattr(flags, name) < least:
            raise UsageError(f"--{name} is {getattr(flags, name)}, want {least} or more.")
    return flags


class _Parser(argparse.ArgumentParser):
    """Tells a mistake as the rest of ctl does."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"The command line cannot be read: {message}; see --help.")


def _check_gpus(workers: int) -> None:
    gpus = gpu.list_gpus(os.environ)
    if gpus and workers > len(gpus):
        raise UsageError(
            f"--workers is {workers}, and there are {len(gpus)} GPUs: start at most as many, or set "
            "CUDA_VISIBLE_DEVICES=-1 to train on the CPU."
        )


def _has_an_end(place: Cluster) -> bool:
    """Whether the process ends by itself: workers and servers of a chief wait to be used."""
    return not place.has_servers or place.role == "chief"


def _obituary(process: Process) -> str:
    return (
        f"{process.place.name} failed first ({_how(process)}); stopping the rest. Its last lines are "
        "above."
    )


def _how(process: Process) -> str:
    code = process.code or 0
    return f"killed by {signal.Signals(code - 128).name}" if code > 128 else f"exit code {code}"


def _prefixed(place: Cluster, line: str) -> str:
    name = f"[{place.name}]"
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        offset = 0 if place.role == "chief" else 1 + place.index + 3 * (place.role == "ps")
        name = f"\033[{_COLOURS[offset % len(_COLOURS)]}m{name}\033[0m"
    return f"{name} {line}"


def _tell(text: str) -> None:
    print(f"ctl.launch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
