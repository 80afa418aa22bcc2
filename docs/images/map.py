"""Draws map.svg: the packages of ctl, and which of them imports which.

python docs/images/map.py

The layers are those of tests/architecture_test.py, and the arrows are the imports of the code.
"""

import pathlib
import sys

_FILE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(_FILE.parents[2]))

import svg  # noqa: E402

from tests import architecture_test as architecture  # noqa: E402

TITLE = "The packages of ctl and their imports"
_WIDTH, _HEIGHT, _GAP = 92, 26, 16
# Rows of the picture, from the top: what a user calls, what it is made of, what is below it.
_ROWS = (
    ("ray", "main"),
    ("modes", "launch", "commands"),
    ("loop", "testing"),
    ("evaluator", "step", "trainer", "replica"),
    ("checks", "built", "compile", "parts"),
    ("update", "layers"),
    ("keras", "kernels"),
    ("random", "rows", "graphs", "data"),
    ("configs", "hardware"),
    ("private", "optimizers", "errors", "lazy", "version"),
)


def imports() -> dict[str, set[str]]:
    """Returns the packages that each package imports."""
    edges: dict[str, set[str]] = {name: set() for name in architecture.LEVELS}
    for path in architecture.FILES:
        source = architecture.entry(path)
        for name in architecture.imports(path):
            if name[0] == "ctl" and len(name) > 1 and name[1] in edges and name[1] != source:
                edges[source].add(name[1])
    return edges


def direct(edges: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Returns the imports that no chain of other imports contains."""
    below: dict[str, set[str]] = {}
    for name in sorted(edges, key=architecture.LEVELS.__getitem__):
        below[name] = edges[name].union(*(below.get(other, set()) for other in edges[name]))
    return {
        (name, other)
        for name, others in edges.items()
        for other in others
        if not any(other in below.get(between, ()) for between in others - {other})
    }


def draw() -> tuple[float, float, list[str]]:
    """Returns the size and the elements of the picture."""
    assert sorted(name for row in _ROWS for name in row) == sorted(architecture.LEVELS)
    widest = max(map(len, _ROWS))
    width = widest * (_WIDTH + _GAP) + _GAP
    places = {}
    for i, row in enumerate(_ROWS):
        start = (width - len(row) * (_WIDTH + _GAP) + _GAP) / 2
        for j, name in enumerate(row):
            places[name] = (start + j * (_WIDTH + _GAP), 10 + i * (_HEIGHT + 34))
    arrows, rooms = [], []
    for name, other in sorted(direct(imports())):
        (x, y), (to_x, to_y) = places[name], places[other]
        if y < to_y:
            arrows.append(svg.arrow(x + _WIDTH / 2, y + _HEIGHT, to_x + _WIDTH / 2, to_y - 1))
        else:  # rooms of one row
            left, right = (to_x + _WIDTH, x) if to_x < x else (to_x, x + _WIDTH)
            arrows.append(svg.arrow(right, y + _HEIGHT / 2, left, to_y + _HEIGHT / 2))
    for name, (x, y) in places.items():
        rooms += [svg.box(x, y, _WIDTH, _HEIGHT), svg.text(x + _WIDTH / 2, y + 18, name, "middle")]
    return width, 10 + len(_ROWS) * (_HEIGHT + 34) - 24, arrows + rooms


if __name__ == "__main__":
    width, height, elements = draw()
    target = _FILE.with_suffix(".svg")
    svg.write(target, TITLE, width, height, elements, size=13)
