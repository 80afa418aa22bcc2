"""Measures how times grow with replicas and variables.

    python -m benchmarks.growth
    python -m benchmarks.growth --parts replicas variables

Each point is measured in processes of its own, which take turns: the processor time to trace and run
the first step, and that of a later step. Beside ctl the same model is trained by a hand-written loop,
which shows what TensorFlow needs itself. Its replicas are logical CPUs that share the cores, so that a
step on twice as many replicas has twice as much to compute. `exponent` is the slope of the least-squares
line through the logarithms of sizes and times: 1 is linear growth.
"""

import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks import flags as command_line
from benchmarks import results
from benchmarks.first_step import PLAIN

SIZES = {"replicas": [1, 2, 4, 8, 16], "variables": [10, 100, 1_000]}
UNITS = {"replicas": "replicas, 20 variables", "variables": "variables, 1 replica"}
COLUMNS = {"first": "first step, s", "step": "step, ms"}
PROGRAMS = ("ctl", PLAIN)


def main(arguments: list[str] | None = None) -> None:
    """Measures the parts; prints a table for each."""
    choices = {"parts": SIZES}
    flags = command_line.parse(
        __doc__, arguments, choices, parts=list(SIZES), rounds=3, result=pathlib.Path
    )
    tables = {}
    for part in flags.parts:
        sizes = SIZES[part]
        points: dict = {(program, size): [] for program in PROGRAMS for size in sizes}
        for number in range(flags.rounds):
            for program, size in random.Random(number).sample([*points], len(points)):
                points[program, size].append(measure(part, program, size))
        tables[part] = table(part, sizes, points)
        values = np.log([row[1:] for row in tables[part].rows])
        exponents = np.polyfit(np.log(sizes), values, 1)[0]  # p of the fit values = c sizes^p
        print(f"\n{results.format_table(vars(tables[part]))}")
        print(f"| exponent | {' | '.join(f'{each:.2f}' for each in exponents)} |", flush=True)
    if flags.result:
        results.save(
            flags.result,
            tables,
            samples=f"processor time, medians of {flags.rounds} starts",
            packages=["tensorflow-cpu", "tf-keras"],
        )


def measure(part: str, program: str, size: int) -> dict[str, float]:
    """Measures a point in a new process."""
    variables, replicas = (20, size) if part == "replicas" else (size, 1)
    command = [sys.executable, "-m", "benchmarks.first_step_worker"]
    command += [program, str(variables), str(replicas)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def table(part: str, sizes: list[int], points: dict) -> results.Table:
    """Returns the medians of a part."""
    columns = [(program, key) for key in COLUMNS for program in PROGRAMS]
    names = [(f"{COLUMNS[key]}, {program}", 2) for program, key in columns]
    rows = [
        [size, *(statistics.median(r[key] for r in points[p, size]) for p, key in columns)]
        for size in sizes
    ]
    return results.Table([(UNITS[part], 0), *names], rows)


if __name__ == "__main__":
    main()
