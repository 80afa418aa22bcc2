"""Formats tables of text without TensorFlow."""

from collections.abc import Iterable, Sequence


def align(rows: Iterable[Sequence[str]]) -> list[str]:
    """Formats the rows of a table as lines, with the cells of a column below each other."""
    columns = [
        [cell.ljust(max(map(len, cells))) for cell in cells] for cells in zip(*rows, strict=True)
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
