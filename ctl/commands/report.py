"""ctl report RUN...: writes an HTML page about a run, or a comparison of several, without a server.

    ctl report runs/mnist
    ctl report runs/a runs/b --output=comparison.html
    ctl report runs/sweep                               # a folder with several runs

The page contains its plots, made by plotly, so that it can be sent and opened anywhere.
"""

from collections.abc import Iterable, Sequence
import datetime
import html
import importlib.util
import math
import os
import pathlib
from typing import Any

from ctl import errors
from ctl.commands import Parser, run_files
from ctl.commands.run_files import SPEED, RunFiles
from ctl.configs import keys, overrides
from ctl.errors import UsageError, is_url, print_line
from ctl.hardware.file_systems import create
from ctl.loop.progress import format_duration, format_numbers
from ctl.loop.store import fetch


def main(arguments: Sequence[str]) -> int:
    """Writes the page and prints where it is; returns the exit code.

    Raises:
        UsageError: an argument is wrong, a file is damaged, or plotly is not installed.
    """
    form = "ctl report RUN... --output=FILE.html"
    parser = Parser("ctl report", form, __doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="the workdir of a run, or of a sweep"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the page; by default RUN/report.html, or report.html for several runs",
    )
    values = parser.parse_args(list(arguments))
    require_plotly("A report")
    runs = run_files.read_runs([fetch(run, texts_only=True) for run in values.runs])
    in_run = len(values.runs) == 1 and not is_url(values.runs[0])
    default = pathlib.Path(values.runs[0] if in_run else ".", "report.html")
    path = pathlib.Path(values.output or default)
    _write(path, render(runs))
    print_line(f"{path}: {os.path.getsize(path) / 2**20:.1f} MiB, for a browser.")
    return 0


def _write(path: pathlib.Path, page: str) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file by --output, such as report.html.")
    temporary: Any = path.with_name(f".{path.name}.new")
    try:
        with create(temporary) as file:
            file.write(page)
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): name another file by --output."
        ) from None


# Prefixes of the names of metrics that describe the optimization.
_OPTIMIZER = (
    "learning_rate", "loss_scale", "skipped_steps", "gradient", "parameter", "update", "layer",
)  # fmt: skip
_HIDDEN = ("epoch", "examples")
_MACHINE = ("hardware", "versions")
_SHARES = ("steps", "evaluation", "saving", "starting", "compiling", "lost", "other")
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_MOST_EVENTS = 200
_FIELDS = ("event", "step", "time", "seconds", "operations")  # fields that are shown elsewhere
# Plotly's style of the lines of a split -> its name in the legend.
_DASHES = {"solid": "solid", "dot": "dotted", "dash": "dashed", "dashdot": "dashed and dotted"}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0; padding: 0 2em 2em; }
h2 { border-bottom: 1px solid #ddd; margin-top: 2em; padding-bottom: .2em; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid #eee; padding: .25em .8em;
text-align: left; vertical-align: top; } th { background: #f6f6f6; }
td { overflow-wrap: anywhere; } .scroll { max-height: 30em; overflow: auto; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); }
.plots > div { min-width: 0; }
.runs { overflow-x: auto; } .runs th { cursor: pointer; }
.runs td, .runs th, label { white-space: nowrap; }
.best { background: #eef7ee; }
.legend { background: #fff; border-bottom: 1px solid #ddd; padding: .5em 0; position: sticky;
top: 0; z-index: 1; } .legend label { margin-right: 1.2em; }
.swatch { display: inline-block; height: .8em; margin-right: .4em; width: .8em; }
"""
# Sorts a table by the column that is clicked; shows or hides a curve in all charts. A chart is drawn
# before the next one takes half of its row, so all are resized at the end.
_SCRIPT = """
addEventListener("load", () =>
  document.querySelectorAll(".plotly-graph-div").forEach((chart) => Plotly.Plots.resize(chart)));
function sortRuns(head) {
  const table = head.closest("table"), i = head.cellIndex, up = head.dataset.up !== "1";
  const rows = [...table.rows].slice(1), value = (row) => row.cells[i].dataset.value;
  head.dataset.up = up ? "1" : "0";
  rows.sort((a, b) => {
    const [x, y] = up ? [value(a), value(b)] : [value(b), value(a)];
    return x === "" || y === "" || isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
  });
  rows.forEach((row) => row.parentNode.append(row));
}
function show(box) {
  for (const chart of document.querySelectorAll(".plotly-graph-div")) {
    const traces = chart.data.flatMap((t, i) => (String(t.meta) === box.value ? [i] : []));
    if (traces.length) Plotly.restyle(chart, { visible: box.checked }, traces);
  }
}
"""


def render(runs: Sequence[RunFiles]) -> str:
    """Returns the page, with everything that it needs."""
    from plotly import offline

    ranked, ranking = run_files.rank(runs)
    title = f"ctl report: {', '.join(run.name for run in runs)}"
    if len(runs) > 1:
        about = [_section("Runs", _comparison(ranked, ranking))]
    else:
        about = [
            _section("Summary", _table(["", runs[0].name], _describe(runs[0]).items())),
            _section("Config, where it differs from the defaults", _config(runs[0])),
        ]
    parts = [
        f"<h1>{_escape(title if len(runs) < 4 else f'ctl report: {len(runs)} runs')}</h1>",
        *about,
        *_curves(ranked),
        _section("Use of the wall time", _goodput(ranked)),
        *_profiles(ranked),
        *(_section(f"Events of {run.name}", _events(run)) for run in ranked),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_escape(title)}</title><style>{_STYLE}</style>"
        f"<script>{offline.get_plotlyjs()}</script><script>{_SCRIPT}</script></head><body>\n"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _comparison(runs: Sequence[RunFiles], ranking: str) -> str:
    """Returns one row per run, best first, and a column per key that differs and per metric."""
    rows = [_row(run) for run in runs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    # The settings of the machine are shown if they differ, as the keys of the config are.
    values = {name: {str(row.get(name, "")) for row in rows} for name in names}
    alike = {n for n in names if len(values[n]) == 1 and n.startswith((*_MACHINE, "config."))}
    names = [name for name in names if name not in alike and values[name] != {""}]
    head = "".join(
        f'<th onclick="sortRuns(this)">{_escape(n.removeprefix("config."))}</th>'
        for n in ("run", *names)
    )
    lines = []
    for index, (run, row) in enumerate(zip(runs, rows, strict=True)):
        mark = " (best)" if ranking and not index else ""
        cells = [_cell(f"{run.name}{mark}"), *(_cell(row.get(name, "")) for name in names)]
        lines.append(f"<tr{' class=best' if mark else ''}>{''.join(cells)}</tr>\n")
    note = f"Best first, by {ranking}. " if ranking else ""
    table = f"<table><tr>{head}</tr>\n{''.join(lines)}</table>"
    return f'<p>{note}Click on a heading to sort.</p><div class="runs">{table}</div>'


def _row(run: RunFiles) -> dict[str, Any]:
    metrics = {n: v for n, v in run.last_values().items() if _is_metric(n.rpartition("/")[2])}
    text = _describe(run)
    machine = {name: text[name] for name in _MACHINE if name in text}
    speed = run.result.get("examples_per_second") or ""
    shares = run.goodput()
    return {
        **{f"config.{key}": errors.show_value(value) for key, value in run.config.items()},
        **metrics,
        "best": text.get("best", ""),
        "state": text["state"],
        "step": run.last_step(),
        "examples/s": speed,
        "wall time": text.get("wall time", ""),
        "in steps": shares.get("steps", "") if shares else "",
        **machine,
    }


def _cell(value: Any) -> str:
    number = isinstance(value, int | float)
    text = f"{value:,.5g}" if isinstance(value, float) else f"{value:,}" if number else value
    return f'<td data-value="{_escape(value)}">{_escape(text)}</td>'


def _is_metric(name: str) -> bool:
    return name not in _HIDDEN and _section_of(name) == "Metrics"


def _describe(run: RunFiles) -> dict[str, str]:
    result = run.result
    texts = {
        "state": run.state(),
        "step": f"{run.last_step():,} of {run.config.get('train.steps')}",
        "training": format_numbers(result.get("train") or {}),
        "evaluation": format_numbers(result.get("eval") or {}),
    }
    best, stopped = result.get("best"), result.get("stopped")
    if best:
        texts["best"] = f"{best['metric']} {best['value']:.5g} at step {best['step']}"
    if stopped:
        texts["ended early"] = str(stopped.get("reason"))
    if result.get("examples_per_second"):
        texts["examples/s"] = f"{result['examples_per_second']:,.0f}"
    shares = run.goodput()
    if shares:
        texts["wall time"] = format_duration(shares["seconds"])
        texts["goodput"] = f"{shares['steps']:.1%} in steps"
    if result.get("flops_per_step"):
        texts["flops per step"] = f"{result['flops_per_step']:.4g}"
    if result.get("model_flops_utilization"):
        texts["model-flops utilization"] = f"{result['model_flops_utilization']:.1%}"
    if "strategy" in result:
        texts["hardware"] = f"{result['strategy']}, {result.get('replicas', '?')} replicas"
    versions = result.get("versions") or {}
    texts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return texts


def _curves(runs: Sequence[RunFiles]) -> list[str]:
    """Returns a legend, and three sections with one chart per metric, of all runs and splits."""
    curves = [run.curves() for run in runs]
    names = list(dict.fromkeys(name for metrics in curves for name in metrics))
    splits = list(dict.fromkeys(s for metrics in curves for each in metrics.values() for s in each))
    sections: dict[str, list[str]] = {"Metrics": [], "Optimization": [], "Speed and memory": []}
    for name in names:
        if name not in _HIDDEN:
            sections[_section_of(name)].append(name)
    parts = [_legend(runs, splits)]
    for title, listed in sections.items():
        charts = "".join(_chart(name, runs, curves, splits) for name in listed)
        if charts:
            parts.append(_section(title, f'<div class="plots">{charts}</div>'))
    if len(parts) == 1:
        return [_section("Metrics", "<p>There is no metrics.jsonl with a record yet.</p>")]
    return parts


def _legend(runs: Sequence[RunFiles], splits: Sequence[str]) -> str:
    """Returns the legend of all charts; its boxes show and hide curves."""
    labels = [run.name for run in runs] if len(runs) > 1 else splits
    boxes = "".join(
        f'<label><input type="checkbox" checked value="{i}" onchange="show(this)">'
        f'<span class="swatch" style="background: {_COLORS[i % len(_COLORS)]}"></span>'
        f"{_escape(label)}</label>"
        for i, label in enumerate(labels)
    )
    styles = [f"{split}: {_DASHES[_dash(splits, split)]}" for split in splits]
    note = f"<span>{_escape(', '.join(styles))}</span>" if len(runs) > 1 else ""
    return f'<div class="legend">{boxes}{note}</div>'


def _dash(splits: Sequence[str], split: str) -> str:
    return [*_DASHES][splits.index(split) % len(_DASHES)]


def _section_of(name: str) -> str:
    if name.startswith(SPEED):
        return "Speed and memory"
    return "Optimization" if name.startswith(_OPTIMIZER) else "Metrics"


def plot(run: RunFiles) -> Any:
    """Returns a figure of plotly with a chart per metric, in which the splits are drawn on each other.

    Raises:
        UsageError: plotly is not installed, or nothing was recorded.
    """
    require_plotly("A figure")
    from plotly import subplots

    curves = run.curves()
    names = [name for name in curves if _is_metric(name)]
    if not names:
        raise UsageError(f"{run.name} has no metric in a metrics.jsonl yet: train first.")
    splits = list(dict.fromkeys(split for name in names for split in curves[name]))
    figure = subplots.make_subplots(rows=1, cols=len(names), subplot_titles=[*map(_escape, names)])
    for column, name in enumerate(names, start=1):
        for trace in _traces(name, [run], [curves], splits):
            figure.add_trace(trace.update(showlegend=column == 1), row=1, col=column)
    figure.update_xaxes(title="step")
    return figure.update_layout(template="plotly_white", height=340)


def require_plotly(what: str) -> None:
    """Raises UsageError if plotly, which `what` requires, is not installed."""
    if importlib.util.find_spec("plotly") is None:
        raise UsageError(
            f"{what} requires the package plotly: run pip install 'ctl-tensorflow[report]'."
        )


def _traces(
    name: str, runs: Sequence[RunFiles], curves: Sequence[Any], splits: Sequence[str]
) -> list[Any]:
    from plotly import graph_objects

    traces, several = [], len(runs) > 1
    for index, (run, metrics) in enumerate(zip(runs, curves, strict=True)):
        for split, (steps, values) in metrics.get(name, {}).items():
            # One color per run and one style per split; for a single run, one color per split.
            entry = index if several else splits.index(split)
            dash = _dash(splits, split) if several else "solid"
            trace = graph_objects.Scatter(
                x=steps,
                y=values,
                name=f"{run.name} {split}" if several else split,
                mode="lines+markers" if split != "train" or len(steps) < 3 else "lines",
                line={"color": _COLORS[entry % len(_COLORS)], "dash": dash},
                meta=entry,
            )
            traces.append(trace)
    return traces


def _chart(
    name: str, runs: Sequence[RunFiles], curves: Sequence[Any], splits: Sequence[str]
) -> str:
    from plotly import graph_objects

    figure = graph_objects.Figure(_traces(name, runs, curves, splits))
    drawn = {value for trace in figure.data for value in trace.y if math.isfinite(value)}
    if len(drawn) == 1:  # Plotly's range is the constant plus and minus 1, where 0.001 looks like 0
        (constant,) = drawn
        figure.update_yaxes(range=sorted((0, 2 * constant)) if constant else None)
    figure.update_layout(title=_escape(name), xaxis_title="step", showlegend=False, height=340)
    figure.update_layout(
        template="plotly_white", margin={"l": 60, "r": 20, "t": 50, "b": 45}, hovermode="x unified"
    )
    return figure.to_html(
        full_html=False, include_plotlyjs=False, config={"responsive": True}, default_height="340px"
    )


def _goodput(runs: Sequence[RunFiles]) -> str:
    shares = [run.goodput() for run in runs]
    if not any(shares):
        return "<p>Not measured yet: the first checkpoint records it.</p>"
    rows = [
        [run.name, *(f"{share.get(name, 0.0):.1%}" for name in _SHARES)]
        for run, share in zip(runs, shares, strict=True)
    ]
    note = (
        "<p>lost: steps that were computed again after a kill; compiling: tracing and compiling the "
        "first inner loop; steps: including the wait for data.</p>"
    )
    return _table(["run", *_SHARES], rows) + note


def _profiles(runs: Sequence[RunFiles]) -> list[str]:
    parts = []
    for run, event in [(each, event) for each in runs for event in each.events]:
        operations = event.get("operations") if event.get("event") == "profile" else None
        if operations:
            total = sum(seconds for _, seconds in operations)
            rows = [
                [name, f"{1e3 * seconds:.3f} ms", f"{seconds / total:.1%}"]
                for name, seconds in operations
            ]
            steps = f"steps {event['first']} to {event['step']}"
            table = _table(["operation", "time", "share of these"], rows)
            parts.append(_section(f"Costliest operations of {run.name}, {steps}", table))
    return parts


def _config(run: RunFiles) -> str:
    """Returns the table of keys that differ from the defaults."""
    default, config = overrides.flatten(keys.defaults()), run.config
    rows = []
    for key in sorted({*default, *config}):
        values = [errors.show_value(c[key]) if key in c else "" for c in (default, config)]
        if values[0] != values[1]:
            rows.append([key, *values])
    return _table(["key", "default", run.name], rows) if rows else "<p>None.</p>"


def _events(run: RunFiles) -> str:
    rows = []
    for event in run.events[-_MOST_EVENTS:]:
        fields = {k: v for k, v in event.items() if k not in _FIELDS and v not in ([], {}, "")}
        time = datetime.datetime.fromtimestamp(event.get("time", 0.0))
        rows.append([f"{time:%Y-%m-%d %H:%M:%S}", event.get("step", ""), event.get("event", ""),
                     format_numbers(fields)])  # fmt: skip
    more = len(run.events) - len(rows)
    note = f"<p>The last {len(rows)} events; {more} earlier ones are not shown.</p>" if more else ""
    table = _table(["time", "step", "event", ""], rows)
    return f'{note}<div class="scroll">{table}</div>'


def _section(title: str, content: str) -> str:
    return f"<h2>{_escape(title)}</h2>\n{content}"


def _table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    lines = ["".join(f"<th>{_escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{_escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"


def _escape(value: Any) -> str:
    return html.escape(str(value))
