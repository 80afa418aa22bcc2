"""Measures the time to the first step of ctl, a hand-written loop, Orbit and tf_keras' fit.

    python -m benchmarks.first_step --models mnist --replicas 1

Each measurement is a new process: the seconds from its start to the end of the first step, and the
seconds in which the same process builds a second trainer and runs its first step. The programs take
turns, in another order each round. The table has the medians, and the median over the rounds of the
ratio to the hand-written loop. All programs train the same model on the same arrays, with Adam, on
replicas that are logical CPUs. `ctl experiments/mnist.py` is the whole command, with its config, workdir
and summaries; it has no second trainer.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import results

PLAIN, KERAS_3, COMMAND = "hand-written", "ctl, Keras 3", "ctl experiments/mnist.py"
ROWS = 16  # of a global batch


def main(arguments: list[str] | None = None) -> None:
    """Measures all programs; prints one table per model and number of replicas."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_step", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=5)
    results.add_flag(parser)
    flags = parser.parse_args(arguments)
    tables = {}
    for model in flags.models:
        for replicas in flags.replicas:
            programs = [
                name
                for name in flags.programs
                if name != COMMAND or (model, replicas) == ("mnist", 1)
            ]
            rounds = [measure_round(model, replicas, programs, seed=n) for n in range(flags.rounds)]
            print(f"\n{table(model, replicas, rounds)}", flush=True)
            if flags.result:
                tables[f"{model}_{replicas}"] = result_table(rounds)
    if flags.result:
        results.save(
            flags.result,
            tables,
            samples=f"medians of {flags.rounds} rounds",
            packages=["tensorflow-cpu", "tf-keras"],
        )


def measure_round(
    model: str, replicas: int, programs: list[str], *, seed: int
) -> dict[str, tuple[float, float | None]]:
    """Returns the seconds of the first and of the second trainer by program."""
    order = random.Random(seed).sample(programs, len(programs))
    return {name: measure(name, model, replicas) for name in order}


def measure(program: str, model: str, replicas: int) -> tuple[float, float | None]:
    """Runs a program in a new process."""
    if program == COMMAND:
        command = ["ctl.main", *COMMAND_FLAGS]
    else:
        command = ["benchmarks.first_step_worker", program, model, str(replicas)]
    with tempfile.TemporaryDirectory(prefix="ctl-first-step-") as folder:
        command += [f"--workdir={folder}"] if program == COMMAND else []
        start = time.monotonic()
        output = subprocess.run(
            [sys.executable, "-m", *command], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    end_of_first, second = json.loads(output.splitlines()[-1])
    return end_of_first - start, second


def table(model: str, replicas: int, rounds: list[dict[str, tuple[float, float | None]]]) -> str:
    """Formats medians, and ratios to the hand-written loop if it was measured."""
    rows = [
        f"### {model}, {replicas} replica{'s' * (replicas > 1)}, {len(rounds)} rounds",
        "",
        "| program | first step of a process | ratio | second trainer | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in (name for name in PROGRAMS if name in rounds[0]):
        cells = []
        for place in (0, 1):
            if rounds[0][name][place] is None:
                cells += ["", ""]
                continue
            cells.append(f"{statistics.median(r[name][place] for r in rounds):.2f} s")
            ratios = [r[name][place] / r[PLAIN][place] for r in rounds if PLAIN in r]
            cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def result_table(rounds: list[dict[str, tuple[float, float | None]]]) -> results.Table:
    """Returns the medians, and the ratio of each program to ctl."""
    rows: list[list[Any]] = []
    for name in (name for name in PROGRAMS if name in rounds[0]):
        row: list[Any] = [name]
        for place in (0, 1):
            times = [each[name][place] for each in rounds]
            ratios = [
                time and time / each["ctl"][place] for time, each in zip(times, rounds, strict=True)
            ]
            for values in (times, [] if name == "ctl" else ratios):
                row.append(None if None in values or not values else statistics.median(values))
        rows.append(row)
    ratio = "ctl is N times as fast"
    columns = [("program", None), ("first step of a process, s", 2), (ratio, 2)]
    return results.Table([*columns, ("second trainer, s", 2), (ratio, 2)], rows)


MODELS = ("mnist", "transformer", "resnet50")
PROGRAMS = ("ctl", COMMAND, KERAS_3, PLAIN, "orbit", "tf_keras fit")
COMMAND_FLAGS = (
    "--config=experiments/mnist.py",
    "--config.trainer=benchmarks.first_step_trainer:FirstStepTrainer",
    "--config.train.steps_per_loop=1",
    f"--config.data.global_batch_size={ROWS}",
)

if __name__ == "__main__":
    main()
