"""The measurements that the documentation shows: one JSON file each, and the tables made from them.

    python -m benchmarks.results                                    # writes the tables into the pages
    python -m benchmarks.loops --result benchmarks/results/loops.json    # measures, then writes a file

A page has the table `speed` of loops.json between `<!-- results: loops.speed -->` and
`<!-- end of results -->`. The tests fail if a table, or a figure of README.md, differs from its file.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
END = "<!-- end of results -->"
_MARK = re.compile(rf"<!-- results: (\w+)\.(\w+) -->\n.*?{END}", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a measurement.

    Attributes:
        columns: the title of each column, and the digits after the point of its numbers; None for texts.
        rows: one value per column: a text, a number, a list [median, low, high] of a 95 % interval, or
            None for what was not measured.
    """

    columns: Sequence[tuple[str, int | None]]
    rows: Sequence[Sequence[Any]]


def save(
    path: pathlib.Path,
    tables: Mapping[str, Table],
    *,
    samples: str,
    packages: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
    host: Mapping[str, Any] | None = None,
    command: str = "",
) -> None:
    """Writes a measurement of this commit.

    Args:
        path: the file, in benchmarks/results.
        tables: name -> table.
        samples: what the numbers are, such as "medians of 36 windows in 3 processes".
        packages: the packages of this environment whose versions belong to the measurement.
        versions: package -> version, of further environments.
        host: the machine, as from `describe_host`; this one by default.
        command: what has measured; the command of this process by default.
    """
    measurement = {
        "date": f"{datetime.date.today()}",
        "commit": _commit(),
        "host": dict(host or describe_host()),
        "versions": {**{n: importlib.metadata.version(n) for n in packages}, **(versions or {})},
        "command": command or _command(),
        "samples": samples,
        "tables": {name: dataclasses.asdict(table) for name, table in tables.items()},
    }
    path.write_text(_format(measurement) + "\n")


def describe_host() -> dict[str, Any]:
    """Returns the processor and the number of cores of this machine."""
    text = pathlib.Path("/proc/cpuinfo").read_text()
    processor = next(iter(re.findall(r"model name\s*: (.+)", text)), "unknown")
    return {"processor": processor, "cores": len(os.sched_getaffinity(0))}


def load(name: str) -> dict[str, Any]:
    """Returns a measurement by the name of its file."""
    measurement: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return measurement


def figure(name: str, table: str, row: str, column: str) -> str:
    """Returns one number of a table as the pages show it, without its interval."""
    shown = load(name)["tables"][table]
    place = [title for title, _ in shown["columns"]].index(column)
    value = next(cells[place] for cells in shown["rows"] if cells[0] == row)
    return _cell(value, shown["columns"][place][1]).partition(" (")[0]


def pages() -> Iterator[tuple[pathlib.Path, str]]:
    """Yields the pages that show measurements, with the text that they must have."""
    for path in sorted(ROOT.glob("docs/**/*.md")):
        text = path.read_text()
        if _MARK.search(text):
            yield path, _fill(text)


def _fill(text: str) -> str:
    """Returns the text of a page with the tables of the files."""
    last = {mark[1]: mark.start() for mark in _MARK.finditer(text)}
    return _MARK.sub(lambda mark: _section(mark, mark.start() in last.values()), text)


def _section(mark: re.Match, is_last: bool) -> str:
    """Returns a table, and the conditions after the last table of a file."""
    name, table = mark.groups()
    measurement = load(name)
    body = format_table(measurement["tables"][table])
    if is_last:
        body += f"\n\n{describe(measurement)}"
    return f"<!-- results: {name}.{table} -->\n{body}\n{END}"


def format_table(table: Mapping[str, Any]) -> str:
    """Returns a table as Markdown."""
    columns = table["columns"]
    lines = [[title for title, _ in columns], ["---" if d is None else "---:" for _, d in columns]]
    digits = [digits for _, digits in columns]
    lines += [[_cell(v, d) for v, d in zip(row, digits, strict=True)] for row in table["rows"]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: Any, digits: int | None) -> str:
    if isinstance(value, list):
        median, low, high = (f"{each:,.{digits}f}" for each in value)
        return f"{median} ({low} to {high})"
    if isinstance(value, int | float):
        return f"{value:,.{digits or 0}f}"
    return value or ""


def describe(measurement: Mapping[str, Any]) -> str:
    """Returns the sentence about the conditions of a measurement."""
    samples, host = measurement["samples"], measurement["host"]
    date = datetime.date.fromisoformat(measurement["date"])
    where = [host["gpu"]] if "gpu" in host else []
    where += [f"{host['cores']} CPU cores ({host['processor']})"]
    versions = [f"{name} {version}" for name, version in measurement["versions"].items()]
    return (
        f"*{samples[:1].upper()}{samples[1:]}. {date:%B %Y}, commit {measurement['commit']}, "
        f"{', '.join([*where, *versions])}: `{measurement['command']}`*"
    )


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _command() -> str:
    """Returns the command of this process, without the file that it writes."""
    words = iter(sys.argv[1:])
    arguments = [w for w in words if w != "--result" or not next(words)]
    module = sys.modules["__main__"].__spec__
    name = module.name.removesuffix(".__main__") if module else sys.argv[0]
    return " ".join(["python -m", name, *(f"'{a}'" if " " in a else a for a in arguments)])


def _format(measurement: Mapping[str, Any]) -> str:
    """Returns JSON with one line per row, so that a changed number is a changed line."""
    lines: list[str] = []

    def in_lines(values: Sequence[Any]) -> list[str]:
        lines.extend(json.dumps(value, ensure_ascii=False) for value in values)
        return [f"line {len(lines) - len(values) + place}" for place in range(len(values))]

    tables = {
        name: {key: in_lines(values) for key, values in table.items()}
        for name, table in measurement["tables"].items()
    }
    text = json.dumps({**measurement, "tables": tables}, indent=2, ensure_ascii=False)
    return re.sub(r'"line (\d+)"', lambda match: lines[int(match[1])], text)
