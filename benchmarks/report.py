"""Statistics of the measured windows, and their tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.results import Table

RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one variant on one model.

    Attributes:
        model: name of the model.
        variant: name of the variant.
        batch: examples per step.
        examples_per_second: the median over windows.
        ratio: the median over paired windows of the speed divided by that of the reference.
        ratio_low: the lower end of its 95 % interval.
        ratio_high: the upper end of its 95 % interval.
        windows: number of measured windows.
        processes: number of processes that the windows were measured in.
    """

    model: str
    variant: str
    batch: int
    examples_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    windows: int
    processes: int


def make_rows(
    model: str,
    batch: int,
    rates: Mapping[str, Sequence[Sequence[float]]],
    reference: str,
) -> list[Row]:
    """Returns one row per variant.

    Args:
        model: name of the model.
        batch: examples per step.
        rates: variant -> processes -> windows -> steps per second. Window w of process p was measured
            in the same round as window w of process p of every other variant.
        reference: the variant that the speeds are divided by.
    """
    paired = np.array(rates[reference])
    return [
        Row(
            model, variant, batch, float(np.median(values)) * batch,
            *interval(np.array(values) / paired), paired.size, len(paired),
        )
        for variant, values in rates.items()
    ]  # fmt: skip


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """Returns the median and its 95 % bootstrap interval.

    The percentile method of Efron & Tibshirani 1993, "An Introduction to the Bootstrap". Processes are
    resampled, then windows within each, because the windows of one process are not independent.

    Args:
        ratios: [processes, windows].
    """
    draw = np.random.default_rng(0)
    processes, windows = ratios.shape
    p = draw.integers(processes, size=(RESAMPLES, processes, 1))
    w = draw.integers(windows, size=(RESAMPLES, processes, windows))
    medians = np.median(ratios[p, w].reshape(RESAMPLES, -1), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def show(
    rows: Sequence[Row],
    reference: str,
    labels: Mapping[str, str],
    path: pathlib.Path | None,
    **conditions: Any,
) -> None:
    """Prints the tables, and writes them to a file, with its conditions for `results.save`."""
    tables = result_tables(rows, reference, labels)
    print("\n\n".join(results.format_table(vars(each)) for each in tables.values()))
    if path:
        samples = f"medians of {rows[0].windows} windows in {rows[0].processes} starts"
        results.save(path, tables, samples=f"{samples}, 95 % intervals", **conditions)


def result_tables(
    rows: Sequence[Row], reference: str, labels: Mapping[str, str]
) -> dict[str, Table]:
    """Returns the tables `speed`, of all variants, and `ratio`, of the reference to each other one.

    Args:
        rows: the rows of all models, whose ratios are to the reference.
        reference: the variant that the pages call ctl.
        labels: variant -> its name on the pages, in the order of the rows.
    """
    cells = {(row.variant, f"{row.model}, batch {row.batch}"): row for row in rows}
    models = list(dict.fromkeys(model for _, model in cells))

    def table(title: str, digits: int, value: Callable[[Row], Any], names: Iterable[str]) -> Table:
        lines = {name: [cells.get((name, model)) for model in models] for name in names}
        return Table(
            [(title, None), *((model, digits) for model in models)],
            [
                [labels[n], *(r and value(r) for r in line)]
                for n, line in lines.items()
                if any(line)
            ],
        )

    def times_as_fast(row: Row) -> list[float]:
        return [round(1 / each, 3) for each in (row.ratio, row.ratio_high, row.ratio_low)]

    others = [name for name in labels if name != reference]
    return {
        "speed": table("per second", 0, lambda row: round(row.examples_per_second), list(labels)),
        "ratio": table("ctl is N times as fast as", 2, times_as_fast, others),
    }
