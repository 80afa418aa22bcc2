"""The table of a sweep's results."""

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any

from ctl.errors import align
from ctl.loop.progress import format_duration, format_numbers

_Entry = Mapping[str, Any]


def summarize(entries: Sequence[_Entry], config: Any, folder: pathlib.Path) -> list[str]:
    """Returns the lines that a sweep ends with.

    Args:
        entries: the entries of sweep.json.
        config: the config of the runs, whose `train.best` names the metric.
        folder: the folder of the sweep.
    """
    rows = [columns(entry) for entry in entries]
    names = [*dict.fromkeys(name for row in rows for name in row)]
    lines = align([names, *([_show(row.get(name)) for name in names] for row in rows)])
    failed = [entry for entry in entries if entry["status"] in ("failed", "stopped")]
    lines += [f"{entry['name']}: {entry['line']}" for entry in failed]
    metric, choose = name_metric(config), max if config.train.best.mode == "max" else min
    results = [(value, e) for e in entries if (value := result(e, metric)) is not None]
    if len(results) > 1:
        value, best = choose(results, key=lambda pair: pair[0])
        seconds = f", {format_duration(best['seconds'])}" if best.get("seconds") else ""
        lines.append(f"Best {metric}: {_show(value)} of {best['name']}{seconds}.")
    return [*lines, f"Sweep: {folder / 'sweep.json'}; ctl report {folder}"]


def columns(entry: _Entry) -> dict[str, Any]:
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


def name_metric(config: Any) -> str:
    """Returns the name of the metric that decides which run is best."""
    name: str = config.train.best.metric or "eval/loss"
    return name


def result(entry: _Entry, metric: str) -> float | None:
    """Returns the metric of a run that is done, if it is a finite number."""
    value = columns(entry).get(metric)
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return value if is_number and entry["status"] == "done" else None


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
