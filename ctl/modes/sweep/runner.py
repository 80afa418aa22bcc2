"""Runs the runs of a sweep, one after the other or several at once."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import contextlib
import pathlib
import signal
import threading
import time
from typing import Any

from ctl.errors import UsageError, print_line
from ctl.hardware.child_process import ChildProcess
from ctl.loop import json_files
from ctl.modes import DONE, FAILED, STOPPED
from ctl.modes.sweep import table
from ctl.modes.sweep.settings import SweepRun

_POLL = 0.1  # seconds


class Runner:
    """Starts a process per run, and records the results in `sweep.json` as they come.

    A run that is done is not started again. A run that was stopped or killed resumes from its last
    checkpoint. A run that fails does not stop the others.

    Args:
        folder: the folder of the sweep; each run has a folder in it.
        command: the command of every run, without its own values and workdir.
        known: the runs that are known before the first one starts.
        fresh: whether to start again the runs that are done.

    Attributes:
        entries: the entries of `sweep.json`, by the names of the runs.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        command: Sequence[str],
        known: Sequence[SweepRun],
        *,
        fresh: bool = False,
    ):
        self._folder, self._command = folder, command
        path = folder / "sweep.json"
        earlier = json_files.read(path)["runs"] if path.exists() and not fresh else []
        self._done = {
            entry["fingerprint"]: entry
            for entry in earlier
            if entry["status"] == "done" and (folder / entry["name"] / "result.json").exists()
        }
        self.entries: dict[str, dict[str, Any]] = {}
        done = sum(self._add(run)["status"] == "done" for run in known)
        count = f" of {len(known)} runs" if known else ""
        print_line(f"Sweep{count} in {folder}" + (f", {done} of them done." if done else "."))
        self._lock = threading.Lock()  # of the entries and of these:
        self._children: set[ChildProcess] = set()
        self._stopping = False

    def run(
        self, runs: Iterable[SweepRun], devices: Sequence[Mapping[str, str]], config: Any
    ) -> int:
        """Runs all runs that are not done; returns the exit code.

        Args:
            runs: the runs; each is read when it can be started.
            devices: for each run at once, the variables that give it devices.
            config: the config of the runs, for the metric that decides which is best.
        """
        waiting = iter(runs)
        # A shell starts a program in the background with SIGINT ignored.
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = {each: signal.signal(each, signal.default_int_handler) for each in signals}
        try:
            with ThreadPoolExecutor(len(devices)) as pool:  # waits for its threads
                try:
                    list(pool.map(lambda device: self._work(waiting, device), devices))
                except KeyboardInterrupt:  # after SIGINT or SIGTERM
                    self._stop()
        except KeyboardInterrupt:
            for child in [*self._children]:
                child.kill()
            raise
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)
        for line in table.summarize([*self.entries.values()], config, self._folder):
            print_line(line)
        states = {entry["status"] for entry in self.entries.values()}
        if self._stopping or "stopped" in states:
            print_line(
                f"The sweep in {self._folder} was stopped: rerun the same command to resume."
            )
            return STOPPED
        return DONE if states == {"done"} else FAILED

    def _add(self, run: SweepRun) -> dict[str, Any]:
        new = {**vars(run), "status": "waiting"}
        return self.entries.setdefault(run.name, self._done.get(run.fingerprint, new))

    def _work(self, waiting: Iterator[SweepRun], device: Mapping[str, str]) -> None:
        """Runs one run after the other, until none is left or the sweep is stopped."""
        while started := self._start(waiting, device):
            entry, child = started
            while (code := child.poll()) is None:
                time.sleep(_POLL)
            child.drain()
            with self._lock:
                self._children.remove(child)
                # A signal may reach a process before it can handle it.
                other = "stopped" if self._stopping else "failed"
                status = {DONE: "done", STOPPED: "stopped"}.get(code, other)
                print_line(f"[{entry['name']}] {status}" + (f" ({code})" if code else ""))
                with contextlib.suppress(UsageError):
                    entry |= json_files.read(self._folder / entry["name"] / "result.json")
                self._record(entry, status=status, exit_code=code)

    def _start(
        self, waiting: Iterator[SweepRun], device: Mapping[str, str]
    ) -> tuple[dict[str, Any], ChildProcess] | None:
        with self._lock:
            for run in () if self._stopping else waiting:
                entry = self._add(run)
                if entry["status"] == "done":
                    continue

                def show(line: str, entry: dict[str, Any] = entry) -> None:
                    entry["line"] = line.strip() or entry["line"]
                    print_line(f"[{entry['name']}] {line.rstrip()}")

                self._record(entry, status="running", line="")
                command = [f"--config.{key}={text}" for key, text in run.values.items()]
                command += [f"--workdir={self._folder / run.name}"]
                child = ChildProcess([*self._command, *command], device, show)
                self._children.add(child)
                return entry, child
        return None

    def _record(self, entry: dict[str, Any], **values: Any) -> None:
        entry |= values
        json_files.replace(self._folder / "sweep.json", {"runs": [*self.entries.values()]})

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            for child in self._children:
                child.send_signal(signal.SIGTERM)
