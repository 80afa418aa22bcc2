"""Draws update.svg: the update of four rows on two replicas.

python docs/images/update.py
"""

import pathlib

import svg

_REPLICAS = (([0, 1], [1, 2]), ([2, 3], [3, 6]))  # the rows of each, and their losses
TITLE = "From the global batch to the optimizer"
SIZE = (740, 460)
_NOTES = (
    (44, "a function of the seed and the step"),
    (124, "padding fills missing rows"),
    (184, "per_example_loss, not reduced"),
    (244, "the weight of the global batch"),
    (314, "once, the same on every replica"),
    (374, "of the gradient of the global batch"),
    (434, "on all replicas, or on none"),
)


def draw() -> list[str]:
    """Returns the elements of the picture, from the batch to the optimizer."""
    total = sum(len(rows) for rows, _ in _REPLICAS)
    rows = [row for rows, _ in _REPLICAS for row in rows]
    title = f"global batch: rows {_list(rows)}"
    elements = [svg.box(120, 20, 240, 36), svg.text(240, 43, title, "middle")]
    for i, (rows, losses) in enumerate(_REPLICAS):
        x = 20 + 240 * i
        center = x + 100
        elements.append(svg.arrow(200 + 80 * i, 56, center, 98))
        steps = (
            (100, f"replica {i}: rows {_list(rows)}"),
            (160, f"losses {_list(losses)}"),
            (220, f"{sum(losses)} / {total}, gradient g{i}"),
        )
        for y, content in steps:
            elements += [svg.box(x, y, 200, 36), svg.text(center, y + 23, content, "middle")]
            elements += [svg.arrow(center, y + 36, center, y + 58)] if y < 220 else []
        elements.append(svg.arrow(center, 256, 210 + 60 * i, 288))
    for y, content in ((290, "all-reduce: g = g0 + g1"), (350, "finite? clip"), (410, "optimizer")):
        elements += [svg.box(120, y, 240, 36), svg.text(240, y + 23, content, "middle")]
        elements += [svg.arrow(240, y + 36, 240, y + 58)] if y < 410 else []
    return elements + [svg.text(485, y, note, "muted") for y, note in _NOTES]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


if __name__ == "__main__":
    target = pathlib.Path(__file__).with_suffix(".svg")
    svg.write(target, TITLE, *SIZE, draw())
