"""Windows -> medians, intervals of paired ratios, a table, JSON lines, a chart."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib

import numpy as np

RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Row:
    """What one variant came to on one model.

    Attributes:
        model: its name.
        variant: its name.
        batch: examples a step.
        examples_per_second: the median over windows.
        microseconds_per_step: the same, as time.
        ratio: the median over paired windows of the speed, divided by the reference's.
        ratio_low: the lower end of its 95 % interval.
        ratio_high: the upper end.
        peak_mib: the largest resident memory of its processes.
        windows: how many were measured.
        processes: how many they were measured in.
    """

    model: str
    variant: str
    batch: int
    examples_per_second: float
    microseconds_per_step: float
    ratio: float
    ratio_low: float
    ratio_high: float
    peak_mib: float
    windows: int
    processes: int


def rows(
    model: str,
    batch: int,
    rates: Mapping[str, Sequence[Sequence[float]]],
    peaks: Mapping[str, float],
    reference: str,
) -> list[Row]:
    """One row a variant.

    Args:
        model: its name.
        batch: examples a step.
        rates: variant -> for each process its windows' steps per second; window w of process p
            was measured beside window w of process p of every other variant.
        peaks: variant -> peak memory in MiB.
        reference: the variant that the others are divided by.
    """
    base = np.array(rates[reference])
    result = []
    for variant, values in rates.items():
        median = float(np.median(values))
        ratio, low, high = interval(np.array(values) / base)
        result.append(
            Row(
                model=model,
                variant=variant,
                batch=batch,
                examples_per_second=median * batch,
                microseconds_per_step=1e6 / median,
                ratio=ratio,
                ratio_low=low,
                ratio_high=high,
                peak_mib=peaks[variant],
                windows=base.size,
                processes=len(base),
            )
        )
    return result


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """The median and its 95 % bootstrap interval (Efron & Tibshirani 1993, percentiles).

    Args:
        ratios: [processes, windows]. Processes are drawn, and windows within each: windows of one
            process are not independent of each other.
    """
    draw = np.random.default_rng(0)
    processes, windows = ratios.shape
    p = draw.integers(processes, size=(RESAMPLES, processes, 1))
    w = draw.integers(windows, size=(RESAMPLES, processes, windows))
    medians = np.median(ratios[p, w].reshape(RESAMPLES, -1), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def table(lines: Sequence[Row], reference: str) -> str:
    """A markdown table of one model."""
    parts = [
        f"### {lines[0].model}, batch {lines[0].batch}",
        "",
        f"| loop | examples/s | µs a step | ratio to '{reference}' (95 %) | peak MiB |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in lines:
        parts.append(
            f"| {row.variant} | {row.examples_per_second:,.0f} | {row.microseconds_per_step:,.0f} "
            f"| {row.ratio:.3f} ({row.ratio_low:.3f} to {row.ratio_high:.3f}) "
            f"| {row.peak_mib:,.0f} |"
        )
    return "\n".join(parts)


def write_json(path: pathlib.Path, lines: Sequence[Row]) -> None:
    """A JSON line a row."""
    path.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in lines))


def write_chart(path: pathlib.Path, lines: Sequence[Row]) -> str:
    """Draws the ratios; says what it did."""
    try:
        import matplotlib
    except ImportError:
        return "No chart: matplotlib is not installed (python3 -m uv run --with matplotlib ...)."
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row.model for row in lines))
    figure, axes = plt.subplots(len(models), squeeze=False, figsize=(9, 3.2 * len(models)))
    for axis, model in zip(axes[:, 0], models, strict=True):
        own = [row for row in lines if row.model == model][::-1]
        ratios = np.array([row.ratio for row in own])
        spread = np.array([[r.ratio - r.ratio_low, r.ratio_high - r.ratio] for r in own]).T
        axis.barh([row.variant for row in own], ratios, xerr=np.maximum(spread, 0), capsize=3)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{model}: speed relative to the best hand-written loop, 95 % interval")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return f"Chart: {path}"
