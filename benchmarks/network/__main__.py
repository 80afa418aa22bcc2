"""Measures what a step costs on a slow network, and compares it with a model of the cost.

    python -m benchmarks.network --out network.jsonl
    python -m benchmarks.network --read network.jsonl    # prints the tables again
    python -m benchmarks.network --predict               # only the computed table; measures nothing

The workers run on hosts that are simulated on this machine, which requires Linux, root and iproute2.
The cost model has two parameters. They are fitted to two of the measurements: those whose chunks occupy
a link for the shortest and for the longest time. The predictions are compared with all others.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import json
import pathlib
import signal
import statistics
import sys

from benchmarks import flags as command_line
from benchmarks.network.cost_model import CostModel, Measurement, fit, predictions, sent_bytes
from benchmarks.network.measure import measure
from benchmarks.network.namespaces import Unavailable


def main(arguments: Sequence[str] | None = None) -> list[Measurement]:
    """Measures and prints the tables; returns the measurements."""
    flags = command_line.parse(
        __doc__,
        arguments,
        models=["mnist", "transformer"],
        workers=[2, 3, 4],
        rates=[50.0, 100.0, 1000.0, None],
        windows=5,
        out=pathlib.Path,
        read=pathlib.Path,
        predict=False,
    )
    if flags.predict:
        print(predictions())
        return []
    if flags.read:
        lines = flags.read.read_text().splitlines()
        measurements = [Measurement(**json.loads(line)) for line in lines]
    else:
        measurements = list(run(flags))
    print(table(measurements, fit(fitted_points(measurements))))
    return measurements


def run(flags: argparse.Namespace):
    """Yields the measurements, and appends each to `flags.out`, if it is set."""
    for model in flags.models:
        for workers in flags.workers:
            try:
                results = measure(model, workers, flags.rates, flags.windows)
            except Unavailable as error:
                raise SystemExit(f"This machine cannot simulate hosts: {error}") from error
            for measurement in results:
                line = json.dumps(dataclasses.asdict(measurement))
                print(line, flush=True)
                if flags.out:
                    with flags.out.open("a") as file:
                        file.write(line + "\n")
            yield from results


def fitted_points(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Returns the two measurements whose chunks occupy a link for the shortest and the longest time."""
    limited = [m for m in measurements if m.mbits is not None]
    limited.sort(key=lambda m: m.gradient_bytes / m.workers / m.mbits)
    return [limited[0], limited[-1]]


def table(measurements: Sequence[Measurement], cost_model: CostModel) -> str:
    """Returns the measurements next to the predictions, as a Markdown table and a summary."""
    fitted = fitted_points(measurements)
    lines = [
        "| model | workers | Mbit/s | computing | reducing | step | predicted | error "
        "| sent per step | predicted |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    errors = []
    for m in measurements:
        sent = sent_bytes(m.workers, m.gradient_bytes)
        if m.mbits is None:
            rate, predicted, error = "no limit", "", ""
        else:
            rate, seconds = f"{m.mbits:,.0f}", cost_model.step(m)
            predicted, error = f"{1e3 * seconds:,.1f} ms", "fitted"
            if m not in fitted:
                errors.append(seconds / m.step - 1)
                error = f"{100 * errors[-1]:+.0f} %"
        lines.append(
            f"| {m.model} | {m.workers} | {rate} | {1e3 * m.computing:,.1f} ms "
            f"| {1e3 * m.reducing:,.1f} ms | {1e3 * m.step:,.1f} ms | {predicted} | {error} "
            f"| {m.sent / 1e6:.2f} MB | {sent / 1e6:.2f} MB |"
        )
    terms = f"{cost_model.overhead:.3f} x bytes / bandwidth + {1e3 * cost_model.latency:.2f} ms"
    lines += ["", f"Fitted: {terms} x rounds."]
    if errors:
        largest = max(errors, key=abs)
        median = statistics.median(map(abs, errors))
        lines[-1] += (
            f" On the other {len(errors)} points the median error is {100 * median:.0f} %, and the "
            f"largest {100 * largest:+.0f} %; {sum(abs(e) <= 0.2 for e in errors)} are within 20 %."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    # By default, SIGTERM ends Python without removing the hosts.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main()
