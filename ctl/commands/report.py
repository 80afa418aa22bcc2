"""ctl report RUN...: writes an HTML page about a run, or a comparison of several, without a server.

    ctl report runs/mnist
    ctl report runs/a runs/b --output=comparison.html

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
from ctl.loop.progress import format_duration, format_numbers
from ctl.loop.store import fetch


def main(arguments: Sequence[str]) -> int:
    """Writes the page and prints where it is; returns the exit code.

    Raises:
        UsageError: an argument is wrong, a file is damaged, or plotly is not installed.
    """
    form = "ctl report RUN... --output=FILE.html"
    parser = Parser("ctl report", form, str(__doc__).partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the workdir of a run")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the page; by default RUN/report.html, or report.html for several runs",
    )
    values = parser.parse_args(list(arguments))
    if importlib.util.find_spec("plotly") is None:
        raise UsageError("A report requires the package plotly: run pip install plotly.")
    runs = run_files.read_runs([fetch(run, texts_only=True) for run in values.runs])
    in_run = len(runs) == 1 and not is_url(values.runs[0])
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
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): name another file by --output."
        ) from None


_OPTIMIZER = (
    *("learning_rate", "loss_scale", "skipped_steps"),
    *("gradient", "parameter", "update", "layer"),
)
_HIDDEN = ("epoch", "examples")
_SHARES = ("steps", "evaluation", "saving", "starting", "compiling", "lost", "other")
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_MOST_EVENTS = 200
_FIELDS = ("event", "step", "time", "seconds", "operations")  # fields that are shown elsewhere
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1240px; padding: 1em; }
h2 { border-bottom: 1px solid #ddd; margin-top: 2em; padding-bottom: .2em; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid #eee; padding: .25em .8em;
text-align: left; vertical-align: top; } th { background: #f6f6f6; }
td { overflow-wrap: anywhere; } .plots { display: flex; flex-wrap: wrap; }
.scroll { max-height: 30em; overflow: auto; }
"""


def render(runs: Sequence[RunFiles]) -> str:
    """Returns the page, with everything that it needs."""
    from plotly import offline

    title = f"ctl report: {', '.join(run.name for run in runs)}"
    parts = [
        f"<h1>{_escape(title)}</h1>",
        _section("Summary", _summary(runs)),
        *_curves(runs),
        _section("Use of the wall time", _goodput(runs)),
        *_profiles(runs),
        _section(*_configs(runs)),
        *(_section(f"Events of {run.name}", _events(run)) for run in runs),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_escape(title)}</title><style>{_STYLE}</style>"
        f"<script>{offline.get_plotlyjs()}</script></head><body>\n"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _summary(runs: Sequence[RunFiles]) -> str:
    rows: dict[str, list[str]] = {}
    for index, run in enumerate(runs):
        for name, text in _describe(run).items():
            rows.setdefault(name, [""] * len(runs))[index] = text
    return _table(["", *(run.name for run in runs)], ([name, *row] for name, row in rows.items()))


def _describe(run: RunFiles) -> dict[str, str]:
    result, steps = run.result, [record.get("step", 0) for record in run.metrics]
    texts = {
        "state": run.state(),
        "step": f"{result.get('step') or max(steps, default=0):,} of {run.config.get('train.steps')}",
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
    texts["hardware"] = f"{result.get('strategy', '')}, {result.get('replicas', '?')} replicas"
    versions = result.get("versions") or {}
    texts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return texts


def _curves(runs: Sequence[RunFiles]) -> list[str]:
    """Returns three sections with one chart per metric, which shows the splits of all runs."""
    curves = [run.curves() for run in runs]
    names = list(dict.fromkeys(name for metrics in curves for name in metrics))
    sections: dict[str, list[str]] = {"Metrics": [], "Optimization": [], "Speed and memory": []}
    for name in names:
        if name not in _HIDDEN:
            sections[_section_of(name)].append(name)
    parts = []
    for title, listed in sections.items():
        charts = "".join(_chart(name, runs, curves) for name in listed)
        if charts:
            parts.append(_section(title, f'<div class="plots">{charts}</div>'))
    return parts or [_section("Metrics", "<p>The run has no metrics.jsonl yet.</p>")]


def _section_of(name: str) -> str:
    if name.startswith(SPEED):
        return "Speed and memory"
    return "Optimization" if name.startswith(_OPTIMIZER) else "Metrics"


def _chart(name: str, runs: Sequence[RunFiles], curves: Sequence[Any]) -> str:
    from plotly import graph_objects

    figure, drawn = graph_objects.Figure(), set[float]()
    for index, (run, metrics) in enumerate(zip(runs, curves, strict=True)):
        for split, (steps, values) in metrics.get(name, {}).items():
            label = split if len(runs) == 1 else f"{run.name} {split}"
            is_evaluation = split != "train"
            # One color per run and one style per split; for a single run, one color per split.
            color = _COLORS[(index if len(runs) > 1 else int(is_evaluation)) % len(_COLORS)]
            line = {"color": color, "dash": "dot" if is_evaluation and len(runs) > 1 else "solid"}
            mode = "lines+markers" if is_evaluation or len(steps) < 3 else "lines"
            figure.add_scatter(x=steps, y=values, name=label, mode=mode, line=line)
            drawn.update(filter(math.isfinite, values))
    if len(drawn) == 1:  # Plotly's range is the constant plus and minus 1, where 0.001 looks like 0
        (constant,) = drawn
        figure.update_yaxes(range=sorted((0, 2 * constant)) if constant else None)
    figure.update_layout(title=_escape(name), xaxis_title="step", showlegend=True)
    figure.update_layout(
        width=600, height=340, template="plotly_white", margin={"l": 60, "r": 20, "t": 50, "b": 45}
    )
    text: str = figure.to_html(full_html=False, include_plotlyjs=False)
    return text


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
    for run in runs:
        for event in run.events:
            if event.get("event") == "profile" and event.get("operations"):
                total = sum(seconds for _, seconds in event["operations"])
                rows = [
                    [name, f"{1e3 * seconds:.3f} ms", f"{seconds / total:.1%}"]
                    for name, seconds in event["operations"]
                ]
                title = (
                    f"Costliest operations of {run.name}, steps {event['first']} to {event['step']}"
                )
                head = ["operation", "time", "share of these"]
                parts.append(_section(title, _table(head, rows)))
    return parts


def _configs(runs: Sequence[RunFiles]) -> tuple[str, str]:
    """Returns the title and the table of keys that differ between runs, or from the defaults."""
    if len(runs) > 1:
        title, compared = "Differences of the configs", [run.config for run in runs]
        head = ["key", *(run.name for run in runs)]
    else:
        title = "Config, where it differs from the defaults"
        compared = [overrides.flatten(keys.defaults()), runs[0].config]
        head = ["key", "default", runs[0].name]
    rows = []
    for key in sorted({key for config in compared for key in config}):
        values = [errors.show_value(c[key]) if key in c else "" for c in compared]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return title, _table(head, rows) if rows else "<p>None.</p>"


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
