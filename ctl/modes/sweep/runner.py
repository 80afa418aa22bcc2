"""Runs the runs of a sweep, one after the other or several at once."""

from collections.abc import Mapping, Sequence
import csv
import json
import math
import pathlib
import signal
import time
from types import FrameType
from typing import Any

from ctl.errors import align, print_line
from ctl.hardware import gpu
from ctl.hardware.child_process import ChildProcess
from ctl.loop import json_files
from ctl.loop.progress import format_duration, format_numbers
from ctl.modes import DONE, FAILED, STOPPED
from ctl.modes.sweep.settings import SweepRun

_POLL = 0.1  # seconds


class Runner:
    """Starts a process per run, and records the results in `sweep.json` as they come.

    A run that is done is not started again. A run that was stopped or killed resumes from its last
    checkpoint. A run that fails does not stop the others.

    Args:
        folder: the folder of the sweep; each run has a folder in it.
        command: the command of every run, without its own values and workdir.
        runs: the runs.
        parallel: the number of runs at once.
        fresh: whether to start again the runs that are done.
        config: the config of one of the runs, for the metric that decides which is best.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        command: Sequence[str],
        runs: Sequence[SweepRun],
        *,
        parallel: int,
        fresh: bool,
        config: Any,
    ):
        self._folder = folder
        self._command = command
        self._runs = runs
        self._parallel = parallel
        self._config = config
        self._signals = 0  # received
        self._children: dict[int, _Child] = {}  # by slot, each with GPUs of its own
        earlier = {} if fresh else self._read_earlier()
        self._entries = [earlier.get(run.fingerprint) or _new_entry(run) for run in runs]

    def run(self) -> int:
        """Runs all runs that are not done; returns the exit code."""
        done = sum(entry["status"] == "done" for entry in self._entries)
        print_line(
            f"Sweep of {len(self._runs)} runs in {self._folder}"
            + (f", {done} of them done." if done else ".")
        )
        waiting = [i for i, entry in enumerate(self._entries) if entry["status"] != "done"]
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self._receive) for number in signals}
        try:
            self._write()
            while self._children or (waiting and not self._signals):
                for slot in range(self._parallel):
                    if slot not in self._children and waiting and not self._signals:
                        self._start(slot, waiting.pop(0))
                self._stop()
                self._collect()
                time.sleep(_POLL)
        finally:
            for child in self._children.values():  # after an error of the sweep itself
                child.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)
        for line in summarize(self._entries, self._config, self._folder):
            print_line(line)
        states = {entry["status"] for entry in self._entries}
        if states == {"done"}:
            return DONE
        if self._signals or "stopped" in states:
            print_line(
                f"The sweep in {self._folder} was stopped: rerun the same command to resume."
            )
            return STOPPED
        return FAILED

    def _start(self, slot: int, index: int) -> None:
        run = self._runs[index]
        values = [f"--config.{key}={value}" for key, value in run.values.items()]
        command = [*self._command, *values, f"--workdir={self._folder / run.name}"]
        logs = self._folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._children[slot] = _Child(index, run.name, command, logs, self._gpus(slot))
        self._entries[index]["status"] = "running"
        self._write()

    def _gpus(self, slot: int) -> dict[str, str]:
        """Returns the variable with the GPUs of a slot; {} unless several runs share the GPUs."""
        gpus = gpu.list_gpus()
        if not gpus or self._parallel == 1:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot :: self._parallel])}

    def _collect(self) -> None:
        """Records the runs that have ended."""
        for slot, child in list(self._children.items()):
            code = child.exit_code()
            if code is None:
                continue
            del self._children[slot]
            entry, run = self._entries[child.index], self._runs[child.index]
            states = {DONE: "done", STOPPED: "stopped"}
            # A signal may reach a process before it can handle it.
            other = "stopped" if self._signals else "failed"
            entry.update(status=states.get(code, other), exit_code=code)
            entry.update(_read_result(self._folder / run.name))
            entry["line"] = "" if entry["status"] == "done" else child.last_line
            print_line(f"[{run.name}] {entry['status']}" + (f" ({code})" if code else ""))
            self._write()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _stop(self) -> None:
        """Asks the runs to save and stop after a signal; kills them after a second one.

        The handler itself cannot do this: it may interrupt the start of a run.
        """
        for child in self._children.values():
            if self._signals > 1:
                child.kill()
            elif self._signals and not child.is_stopping:
                child.is_stopping = True
                child.send_signal(signal.SIGTERM)

    def _write(self) -> None:
        json_files.replace(self._folder / "sweep.json", {"runs": self._entries})
        write_csv(self._folder / "sweep.csv", self._entries)

    def _read_earlier(self) -> dict[str, dict[str, Any]]:
        """Returns the entries of the runs that are done, by fingerprint."""
        path = self._folder / "sweep.json"
        entries = json_files.read(path)["runs"] if path.exists() else []
        return {
            entry["fingerprint"]: entry
            for entry in entries
            if entry["status"] == "done" and (self._folder / entry["name"] / "result.json").exists()
        }


class _Child(ChildProcess):
    """The process of one run. Its output is printed with the run's name, and kept in a file."""

    def __init__(
        self,
        index: int,
        name: str,
        command: Sequence[str],
        logs: pathlib.Path,
        environment: dict[str, str],
    ):
        self.index = index
        self.is_stopping = False
        self.last_line = ""
        self._name = name
        self._log = logs / f"{name}.log"
        super().__init__(command, environment, self._print_line)

    def exit_code(self) -> int | None:
        """Returns the exit code, once the process has ended and its output is printed."""
        code = self.poll()
        if code is not None:
            self.drain()
        return code

    def _print_line(self, line: str) -> None:
        with open(self._log, "a") as log:
            log.write(line)
        self.last_line = line.strip() or self.last_line
        print_line(f"[{self._name}] {line.rstrip()}")


def _new_entry(run: SweepRun) -> dict[str, Any]:
    return {
        "name": run.name, "values": run.values, "status": "waiting", "fingerprint": run.fingerprint,
    }  # fmt: skip


def _read_result(workdir: pathlib.Path) -> dict[str, Any]:
    """Returns the entries of a run's result.json for the table."""
    try:
        result = json.loads((workdir / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    names = ("step", "train", "eval", "best", "stopped", "seconds", "examples_per_second")
    return {name: result[name] for name in names if name in result}


_Entry = Mapping[str, Any]


def summarize(entries: Sequence[_Entry], config: Any, folder: pathlib.Path) -> list[str]:
    """Returns the lines that a sweep ends with.

    Args:
        entries: the entries of sweep.json.
        config: the config of a run, whose `train.best` names the metric.
        folder: the folder of the sweep.
    """
    rows = [_columns(entry) for entry in entries]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = align([names, *([_show(row.get(name)) for name in names] for row in rows)])
    lines += [f"{e['name']}: {e['line']}" for e in entries if e.get("line")]
    best = _best(rows, entries, config)
    lines += [best] if best else []
    return [*lines, f"Sweep: {folder / 'sweep.json'}, {folder / 'sweep.csv'}"]


def write_csv(path: pathlib.Path, entries: Sequence[_Entry]) -> None:
    """Writes the table."""
    rows = [_columns(entry) for entry in entries]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _columns(entry: _Entry) -> dict[str, Any]:
    """Returns one row: the values of the run, its state, and its last numbers."""
    evaluation = flatten("eval", entry.get("eval") or {})
    evaluation.pop("eval/examples", None)
    return {
        **entry["values"],
        "status": entry["status"],
        "step": entry.get("step"),
        **(evaluation or flatten("train", entry.get("train") or {})),
        "seconds": entry.get("seconds"),
    }


def flatten(name: str, values: Any) -> dict[str, Any]:
    """Returns the numbers of a result by their names, such as "eval/loss"."""
    if isinstance(values, Mapping):
        parts = [flatten(f"{name}/{key}", value) for key, value in values.items()]
        return {key: value for part in parts for key, value in part.items()}
    return {name: values} if isinstance(values, int | float) else {}


def _show(value: Any) -> str:
    if isinstance(value, float):
        return format_numbers({"": value}).strip()
    return "" if value is None else str(value)


def _best(rows: Sequence[_Entry], entries: Sequence[_Entry], config: Any) -> str:
    """Names the best run by `train.best.metric`, or by the loss of the evaluation."""
    metric, mode = config.train.best.metric or "eval/loss", config.train.best.mode or "min"
    pairs = zip(rows, entries, strict=True)
    values = [(row.get(metric), entry) for row, entry in pairs if entry["status"] == "done"]
    numbers = [(v, e) for v, e in values if isinstance(v, int | float) and math.isfinite(v)]
    if len(numbers) < 2:
        return ""
    value, entry = (max if mode == "max" else min)(numbers, key=lambda pair: pair[0])
    seconds = f", {format_duration(entry['seconds'])}" if entry.get("seconds") else ""
    return f"Best {metric}: {_show(value)} of {entry['name']}{seconds}."
