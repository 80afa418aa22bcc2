"""Writes the results of a sweep: a table, sweep.csv and sweep.html."""

from collections.abc import Mapping, Sequence
import contextlib
import csv
import importlib
import math
import pathlib
from typing import Any

from ctl.loop.progress import format_duration, format_numbers
from ctl.modes.columns import align

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
        graph_objects: Any = importlib.import_module("plotly.graph_objects")
        subplots: Any = importlib.import_module("plotly.subplots")
        palette: Any = importlib.import_module("plotly.colors").qualitative.D3
    except ImportError:
        return False
    # A run that failed before its first evaluation has metrics of the training only.
    done = [row for row in rows if row["status"] == "done"] or rows
    metrics = [name for name in dict.fromkeys(n for row in done for n in row) if "/" in name]
    if not metrics:
        return False
    figure = subplots.make_subplots(rows=len(metrics), cols=1, subplot_titles=metrics)
    groups = list(dict.fromkeys(_group(row, keys) for row in rows))
    texts = list(dict.fromkeys(row[keys[0]] for row in rows))
    values = [_number(text) for text in texts]
    is_numeric = all(isinstance(value, float) for value in values)
    for number, metric in enumerate(metrics, start=1):
        for index, group in enumerate(groups):
            points = [r for r in rows if _group(r, keys) == group and r.get(metric) is not None]
            if is_numeric:
                points.sort(key=lambda point: _number(point[keys[0]]))
            trace = graph_objects.Scatter(
                x=[_number(point[keys[0]]) for point in points],
                y=[point[metric] for point in points],
                name=group or metric, legendgroup=group,
                # The same color in every plot: only the first one has a legend.
                marker={"color": palette[index % len(palette)], "size": 8},
                mode="lines+markers" if is_numeric else "markers",
                showlegend=bool(group) and number == 1,
            )  # fmt: skip
            figure.add_trace(trace, row=number, col=1)
        if is_numeric:
            is_wide = min(values) > 0 and max(values) >= 10 * min(values)
            figure.update_xaxes(
                type="log" if is_wide else "linear", tickvals=values, ticktext=texts, row=number,
                col=1,
            )  # fmt: skip
        figure.update_xaxes(title=keys[0], row=number, col=1)
    title = f"{path.parent.resolve().name}: {len(rows)} runs"
    figure.update_layout(height=350 * len(metrics) + 60, template="plotly_white", title=title)
    figure.write_html(str(path), include_plotlyjs=True)
    return True


def _group(row: _Entry, keys: Sequence[str]) -> str:
    return ", ".join(f"{key.rpartition('.')[-1]}={row.get(key)}" for key in keys[1:])


def _number(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return float(text)
    return text
