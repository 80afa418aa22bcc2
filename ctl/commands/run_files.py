"""Reads the files of a run, for the commands."""

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

from ctl.configs import overrides
from ctl.errors import UsageError
from ctl.loop import goodput, json_files

# Prefixes of the names of metrics that measure the machine, not the training.
SPEED = (
    "examples_per_second",
    "milliseconds_per_step",
    "peak_memory",
    "gpu_",
    "input_",
    "workers/",
)
_LIVES = ("start", "resume", "end", "stop")
_AXES = ("time", "split", "step")


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The files of a run.

    Attributes:
        name: the name of its folder, unique among the compared runs.
        config: full name of a key -> value.
        metrics: the records of metrics.jsonl, in order.
        events: the records of events.jsonl, in order.
        result: result.json; {} if the run has not ended yet.
        skipped: the content of rollbacks.json: the batches that were skipped after rollbacks.
    """

    name: str
    config: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    result: Mapping[str, Any]
    skipped: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def curves(self) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
        """Returns metric -> split -> steps and values."""
        curves: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
        for record in self.metrics:
            for name, value in record.items():
                if name not in _AXES:
                    splits = curves.setdefault(name, {})
                    steps, values = splits.setdefault(str(record.get("split")), ([], []))
                    steps.append(int(record.get("step", 0)))
                    values.append(float(value))  # also parses the text "NaN"
        return curves

    def state(self) -> str:
        """Returns the state of the run, by the last event of a process."""
        events = [e["event"] for e in self.events if e.get("event") in _LIVES]
        states = {"end": "complete", "stop": "stopped, to be resumed"}
        return states.get("".join(events[-1:]), "running or killed")

    def goodput(self) -> dict[str, float]:
        """Returns the shares of the wall time, from the last result if there is one."""
        shares: dict[str, float] = dict(self.result.get("goodput") or {})
        return shares or goodput.measure_goodput(self.events)


def read_runs(folders: list[str]) -> list[RunFiles]:
    """Reads runs.

    Raises:
        UsageError: a folder holds no run, or one of its files is damaged.
    """
    paths = [pathlib.Path(folder) for folder in folders]
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _read(path: pathlib.Path, name: str) -> RunFiles:
    if not (path / "config.json").exists():
        raise UsageError(f"{path} has no config.json, so it is not a run: name a run's --workdir.")
    result, rollbacks = path / "result.json", path / "rollbacks.json"
    return RunFiles(
        name=name,
        config=overrides.flatten(json_files.read(path / "config.json")),
        metrics=json_files.read_lines(path / "metrics.jsonl"),
        events=json_files.read_lines(path / "events.jsonl"),
        result=json_files.read(result) if result.exists() else {},
        skipped=json_files.read(rollbacks) if rollbacks.exists() else {},
    )
