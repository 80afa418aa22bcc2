"""Executes the notebooks of docs/notebooks/, and writes or compares their outputs.

    python -m docs.notebooks                    # compares; it needs the group `libraries`
    python -m docs.notebooks --write gpt2       # writes the outputs of one notebook

Each notebook runs in a folder of its own, and its outputs are compared as those of the pages
(docs/outputs.py). docs/site/hooks.py makes a page of each, by `to_markdown`.
"""

import base64
from collections.abc import Sequence
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

from absl import app, flags

from docs import outputs

FOLDER = outputs.ROOT / "docs/notebooks"
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 190, 50, 30  # of a chart
_KINDS = ("sa", "sb")
_PLOTLY = "application/vnd.plotly.v1+json"


def read(path: pathlib.Path) -> dict[str, Any]:
    """Returns a notebook."""
    return json.loads(path.read_text())


def texts(cell: dict[str, Any]) -> list[str]:
    """Returns the lines that a cell shows, without pictures."""
    lines = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        text = output.get("text") or ([] if _figure(output) else data.get("text/plain", []))
        lines += "".join(text).rstrip("\n").splitlines()
    return lines


def execute(path: pathlib.Path) -> dict[str, Any]:
    """Returns a notebook with new outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        environment = outputs.Folder(pathlib.Path(folder), None).environment
        environment["PATH"] = os.pathsep.join(
            [str(pathlib.Path(sys.executable).parent), environment["PATH"]]
        )
        environment["PLOTLY_RENDERER"] = "plotly_mimetype"
        client = nbclient.NotebookClient(
            notebook, timeout=1800, resources={"metadata": {"path": folder}}, coalesce_streams=True
        )
        client.execute(env=environment)
    done = json.loads(nbformat.writes(notebook))
    for cell in done["cells"]:
        cell["metadata"] = {}
        if "outputs" in cell:  # progress and warnings are on standard error
            cell["outputs"] = [each for each in cell["outputs"] if each.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            if figure := _figure(output):
                figure["layout"].pop("template", None)  # of plotly, the same in each figure
                output["data"] = {_PLOTLY: figure}
    return done


def compare(path: pathlib.Path, done: dict[str, Any]) -> list[str]:
    """Returns the outputs of a notebook that differ from those of a new run."""
    problems = []
    for old, new in zip(read(path)["cells"], done["cells"], strict=True):
        shown, printed = texts(old), texts(new)
        if not outputs.matches(shown, printed):
            problems.append("".join(new["source"]) + "\nprints:\n" + "\n".join(printed))
    return problems


def to_markdown(path: pathlib.Path) -> str:
    """Returns a notebook as a page."""
    parts = []
    for cell in read(path)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        if lines := texts(cell):
            parts.append("```text\n" + "\n".join(lines) + "\n```")
        parts += [draw(figure) for output in cell.get("outputs", []) if (figure := _figure(output))]
    title, rest = parts[0].partition("\n")[::2]
    return "\n\n".join([title, f"[Download this notebook]({path.name}).", rest.strip(), *parts[1:]])


def _figure(output: dict[str, Any]) -> dict[str, Any]:
    return output.get("data", {}).get(_PLOTLY, {})


def draw(figure: dict[str, Any]) -> str:
    """Returns the charts of `ctl.Run.plot` as a picture."""
    from docs.images import svg

    elements, axes = [], sorted({trace["xaxis"] for trace in figure["data"]})
    for column, axis in enumerate(axes):
        left = _LEFT + column * (_WIDTH + 2 * _LEFT)
        traces = [trace for trace in figure["data"] if trace["xaxis"] == axis]
        steps = [step for trace in traces for step in trace["x"]]
        values = [value for trace in traces for value in trace["y"]]
        low, high = min(values), max(values)
        elements.append(svg.text(left, 18, figure["layout"]["annotations"][column]["text"], "bold"))
        for value in (low, high):
            elements.append(
                svg.text(left - 6, _place(value, low, high), f"{value:.3g}", "end muted")
            )
        for place, trace in enumerate(traces):
            points = [
                (left + _WIDTH * x / max(steps), _place(y, low, high))
                for x, y in zip(trace["x"], trace["y"], strict=True)
            ]
            elements.append(svg.curve(points, _KINDS[place]))
            elements.append(svg.text(left + 120 + 60 * place, 18, trace["name"], _KINDS[place][1:]))
        elements.append(
            svg.text(left + _WIDTH, _TOP + _HEIGHT + 20, f"step {max(steps)}", "end muted")
        )
    width = len(axes) * (_WIDTH + 2 * _LEFT)
    picture = svg.make("Loss and metrics by step", width, _TOP + _HEIGHT + 30, elements)
    data = base64.b64encode(picture.encode()).decode()  # whose style is that of this picture only
    return f"![Loss and metrics by step](data:image/svg+xml;base64,{data})"


def _place(value: float, low: float, high: float) -> float:
    return _TOP + _HEIGHT * (high - value) / ((high - low) or 1)


def main(arguments: Sequence[str]) -> int:
    """Executes the notebooks that are named, or all of them."""
    count = 0
    for path in sorted(FOLDER.glob("*.ipynb")):
        if arguments[1:] and path.stem not in arguments[1:]:
            continue
        done = execute(path)
        problems = compare(path, done)
        print(f"{path.name}: {len(problems)} outputs differ", *problems, sep="\n- ", flush=True)
        count += len(problems)
        if flags.FLAGS.write:
            path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")
    return 1 if count else 0


if __name__ == "__main__":
    app.run(main)
