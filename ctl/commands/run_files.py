"""Reads the files of a run, for the commands."""

from collections.abc import Mapping
import dataclasses
import math
import pathlib
from typing import Any

from ctl.configs import overrides
from ctl.errors import UsageError
from ctl.loop import goodput, json_files
from ctl.loop.workdir import Workdir
from ctl.loop.writers.json_lines import NOT_FINITE

# Prefixes of the names of metrics that measure the machine, not the training.
SPEED = (
    "examples_per_second", "milliseconds_per_step", "peak_memory", "gpu_", "input_", "workers/",
)  # fmt: skip
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
                is_number = isinstance(value, int | float) or value in NOT_FINITE
                if name not in _AXES and is_number:
                    splits = curves.setdefault(name, {})
                    steps, values = splits.setdefault(str(record.get("split")), ([], []))
                    steps.append(int(record.get("step", 0)))
                    values.append(float(value))  # also parses the text "NaN"
        return curves

    def last_step(self) -> int:
        """Returns the step of the result, or of the last record if there is none."""
        steps = [int(record.get("step", 0)) for record in self.metrics]
        return int(self.result.get("step") or max(steps, default=0))

    def last_values(self) -> dict[str, float]:
        """Returns the last value of each curve as "split/metric", training last."""
        values = {
            f"{split}/{name}": numbers[-1]
            for name, splits in self.curves().items()
            for split, (_, numbers) in splits.items()
        }
        return dict(sorted(values.items(), key=lambda item: item[0].startswith("train/")))

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
    """Reads runs. A folder that contains runs, such as that of a sweep, stands for all of them.

    Raises:
        UsageError: a folder holds no run, or one of its files is damaged.
    """
    paths = [path for folder in folders for path in _expand(pathlib.Path(folder))]
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def rank(runs: list[RunFiles] | Any) -> tuple[list[RunFiles], str]:
    """Sorts runs, the best one first, by `train.best.metric` or the loss of the evaluation.

    Returns:
        The runs, and the metric with its direction; "" if fewer than two runs have it.
    """
    config = runs[0].config
    metric = config.get("train.best.metric") or "eval/loss"
    sign = -1 if config.get("train.best.mode") == "max" else 1
    values = {id(run): sign * run.last_values().get(metric, math.nan) for run in runs}
    best = {id(run): (run.result.get("best") or {}) for run in runs}
    for run in runs:  # the value of the best checkpoint, not that of the last evaluation
        if best[id(run)].get("metric") == metric:
            values[id(run)] = sign * float(best[id(run)]["value"])
    if sum(map(math.isfinite, values.values())) < 2:
        return list(runs), ""
    ranked = sorted(runs, key=lambda run: (not math.isfinite(values[id(run)]), values[id(run)]))
    return ranked, f"{metric}, {'largest' if sign < 0 else 'smallest'} first"


def _expand(path: pathlib.Path) -> list[pathlib.Path]:
    runs = sorted(each.parent for each in path.glob("*/config.json"))
    return runs if runs and not (path / "config.json").exists() else [path]


def _read(path: pathlib.Path, name: str) -> RunFiles:
    if not (path / "config.json").exists():
        raise UsageError(f"{path} has no config.json, so it is not a run: name a run's --workdir.")
    rollbacks = path / "rollbacks.json"
    return RunFiles(
        name=name,
        config=overrides.flatten(json_files.read(path / "config.json")),
        metrics=json_files.read_lines(path / "metrics.jsonl", step=int, split=str),
        events=json_files.read_lines(path / "events.jsonl", event=str),
        result=Workdir(path, writes=False).result(),
        skipped=json_files.read(rollbacks) if rollbacks.exists() else {},
    )
