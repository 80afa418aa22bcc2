"""ctl report RUN...: writes an HTML page about a run, or a comparison of several, without a server.

    ctl report runs/mnist
    ctl report runs/a runs/b --output=comparison.html

The page contains its plots, made by plotly, so that it can be sent and opened anywhere.
"""

from collections.abc import Sequence
import importlib.util
import os
import pathlib
from typing import Any

from ctl.commands import Parser, run_files
from ctl.errors import UsageError, is_url, print_line
from ctl.loop.bucket import fetch


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
    runs = run_files.read_runs([fetch.path(run, texts_only=True) for run in values.runs])
    in_run = len(runs) == 1 and not is_url(values.runs[0])
    default = pathlib.Path(values.runs[0] if in_run else ".", "report.html")
    path = pathlib.Path(values.output or default)
    from ctl.commands import report_page

    _write(path, report_page.render(runs))
    print_line(f"{path}: {os.path.getsize(path) / 2**20:.1f} MiB, for a browser.")
    return 0


def _write(path: pathlib.Path, page: str) -> None:
    temporary: Any = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): name another file by --output."
        ) from None
