"""Writes the results of a sweep: a table, sweep.csv and sweep.html."""

from collections.abc import Mapping, Sequence
import csv
import importlib
import math
import pathlib
from typing import Any

from ctl.errors import align
from ctl.loop.progress import format_duration, format_numbers

_Entry = Mapping[str, Any]


def summarize(entries: Sequence[_Entry], config: Any, folder: pathlib.Path) -> list[str]:
    """Returns the lines that a sweep ends with, and writes the plot.

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
    written = [folder / "sweep.json", folder / "sweep.csv"]
    if _write_plot(folder / "sweep.html", rows, list(entries[0]["values"])):
        written.append(folder / "sweep.html")
    return [*lines, f"Sweep: {', '.join(map(str, written))}"]


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
    evaluation = _flatten("eval", entry.get("eval") or {})
    evaluation.pop("eval/examples", None)
    return {
        **entry["values"],
        "status": entry["status"],
        "step": entry.get("step"),
        **(evaluation or _flatten("train", entry.get("train") or {})),
        "seconds": entry.get("seconds"),
    }


def _flatten(name: str, values: Any) -> dict[str, Any]:
    if isinstance(values, Mapping):
        parts = [_flatten(f"{name}/{key}", value) for key, value in values.items()]
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


def _write_plot(path: pathlib.Path, rows: Sequence[_Entry], keys: Sequence[str]) -> bool:
    """Plots each metric over the first key, one line per value of the others; needs plotly."""
    try:
        pandas: Any = importlib.import_module("pandas")
        express: Any = importlib.import_module("plotly.express")
    except ImportError:
        return False
    # A run that failed before its first evaluation has metrics of the training only.
    done = [row for row in rows if row["status"] == "done"] or rows
    metrics = [name for name in dict.fromkeys(n for row in done for n in row) if "/" in name]
    if not metrics:
        return False
    first, *others = keys
    names = [", ".join(f"{k.rpartition('.')[-1]}={row.get(k)}" for k in others) for row in rows]
    frame = pandas.DataFrame(rows).assign(values=names)
    numbers = pandas.to_numeric(frame[first], errors="coerce")
    is_numeric, style = numbers.notna().all(), {}
    if is_numeric:
        is_wide = numbers.min() > 0 and numbers.max() >= 10 * numbers.min()
        style = {"markers": True, "log_x": bool(is_wide)}
        frame = frame.assign(**{first: numbers}).sort_values(first)
    figure = (express.line if is_numeric else express.scatter)(
        frame.melt([first, "values"], metrics, "metric", "value").dropna(subset="value"),
        x=first, y="value", color="values", facet_row="metric", height=350 * len(metrics) + 60,
        title=f"{path.parent.resolve().name}: {len(rows)} runs", template="plotly_white", **style,
    )  # fmt: skip
    figure.update_yaxes(matches=None)  # each metric has its own axis
    figure.write_html(str(path), include_plotlyjs=True)
    return True
