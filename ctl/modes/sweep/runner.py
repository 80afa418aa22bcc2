"""Runs the runs of a sweep, one after the other or several at once."""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import pathlib
import signal
import time
from typing import Any

from ctl.errors import UsageError, print_line
from ctl.hardware.child_process import ChildProcess, receive_signals
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

    def run(
        self, runs: Iterable[SweepRun], devices: Sequence[Mapping[str, str]], config: Any
    ) -> int:
        """Runs all runs that are not done; returns the exit code.

        A first Ctrl-C or SIGTERM stops the runs, which save; a second one kills them.

        Args:
            runs: the runs; each is read when it can be started.
            devices: for each run at once, the variables that give it devices.
            config: the config of the runs, for the metric that decides which is best.
        """
        waiting = (run for run in runs if self._add(run)["status"] != "done")
        free, passed_on = [*devices], 0
        running: list[tuple[ChildProcess, dict[str, Any], Mapping[str, str]]] = []
        with receive_signals() as signals:
            while True:
                while free and not signals and (run := next(waiting, None)):
                    entry, device = self.entries[run.name], free.pop()
                    running.append((self._start(entry, device), entry, device))
                if not running:
                    break
                time.sleep(_POLL)
                for child, _, _ in running if len(signals) > passed_on else ():
                    child.kill() if len(signals) > 1 else child.send_signal(signal.SIGTERM)
                passed_on = len(signals)
                for each in [each for each in running if each[0].poll() is not None]:
                    running.remove(each)
                    child, entry, device = each
                    self._end(entry, child, was_stopped=bool(signals))
                    free.append(device)
        for line in table.summarize([*self.entries.values()], config, self._folder):
            print_line(line)
        states = {entry["status"] for entry in self.entries.values()}
        if signals or "stopped" in states:
            print_line(
                f"The sweep in {self._folder} was stopped: rerun the same command to resume."
            )
            return STOPPED
        return DONE if states == {"done"} else FAILED

    def _add(self, run: SweepRun) -> dict[str, Any]:
        new = {**vars(run), "status": "waiting"}
        return self.entries.setdefault(run.name, self._done.get(run.fingerprint, new))

    def _start(self, entry: dict[str, Any], device: Mapping[str, str]) -> ChildProcess:
        def show(line: str) -> None:
            entry["line"] = line.strip() or entry["line"]
            print_line(f"[{entry['name']}] {line.rstrip()}")

        self._record(entry, status="running", line="")
        values = [f"--config.{key}={text}" for key, text in entry["values"].items()]
        workdir = f"--workdir={self._folder / entry['name']}"
        return ChildProcess([*self._command, *values, workdir], device, show)

    def _end(self, entry: dict[str, Any], child: ChildProcess, *, was_stopped: bool) -> None:
        child.drain()
        code = child.poll()
        # A signal may reach a process before it can handle it.
        other = "stopped" if was_stopped else "failed"
        status = {DONE: "done", STOPPED: "stopped"}.get(code or DONE, other)
        print_line(f"[{entry['name']}] {status}" + (f" ({code})" if code else ""))
        with contextlib.suppress(UsageError):
            entry |= json_files.read(self._folder / entry["name"] / "result.json")
        self._record(entry, status=status, exit_code=code)

    def _record(self, entry: dict[str, Any], **values: Any) -> None:
        entry |= values
        json_files.replace(self._folder / "sweep.json", {"runs": [*self.entries.values()]})
