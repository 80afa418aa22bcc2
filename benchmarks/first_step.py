"""Measures the time to the first step of ctl and of a hand-written loop.

    python -m benchmarks.first_step --models mnist --replicas 1

Each measurement is a new process: the seconds from its start to the end of the first step, and the
seconds in which the same process builds a second trainer and runs its first step. The programs take
turns, in another order each round. The table has the medians, and the median over the rounds of the
ratio to the hand-written loop. All programs train the same model on the same arrays, with Adam, on
replicas that are logical CPUs. `ctl experiments/mnist.py` is the whole command, with its config, workdir
and summaries; it has no second trainer.
"""

import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import flags as command_line
from benchmarks import results

PLAIN, KERAS_3, COMMAND = "hand-written", "ctl, Keras 3", "ctl experiments/mnist.py"
ROWS = 16  # of a global batch


def main(arguments: list[str] | None = None) -> None:
    """Measures all programs; prints one table per model and number of replicas."""
    flags = command_line.parse(
        __doc__,
        arguments,
        choices={"models": MODELS, "programs": PROGRAMS},
        models=list(MODELS),
        replicas=[1, 8],
        programs=list(PROGRAMS),
        rounds=5,
        result=pathlib.Path,
    )
    tables = {}
    for model, replicas in itertools.product(flags.models, flags.replicas):
        whole = (model, replicas) == ("mnist", 1)
        programs = [name for name in flags.programs if whole or name != COMMAND]
        orders = (random.Random(n).sample(programs, len(programs)) for n in range(flags.rounds))
        rounds = [{name: measure(name, model, replicas) for name in order} for order in orders]
        tables[f"{model}_{replicas}"] = each = table(rounds)
        print(f"\n### {model}_{replicas}\n\n{results.format_table(vars(each))}")
    if flags.result:
        results.save(
            flags.result,
            tables,
            samples=f"medians of {flags.rounds} rounds",
            packages=["tensorflow-cpu", "tf-keras"],
        )


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


def table(rounds: list[dict[str, tuple[float, float | None]]]) -> results.Table:
    """Returns the medians, and the ratios to the hand-written loop if it was measured."""
    rows: list[list[Any]] = []
    for name in (name for name in PROGRAMS if name in rounds[0]):
        first, second = zip(*(each[name] for each in rounds), strict=True)
        ratios = [each[name][0] / each[PLAIN][0] for each in rounds if PLAIN in each]
        medians = [values and statistics.median(values) for values in (first, ratios)]
        rows.append([name, *medians, None if None in second else statistics.median(second)])
    columns = [("program", None), ("first step of a process, s", 2)]
    columns += [(f"divided by {PLAIN}", 2), ("second trainer, s", 2)]
    return results.Table(columns, rows)


MODELS = ("mnist", "transformer")
PROGRAMS = ("ctl", COMMAND, KERAS_3, PLAIN)
COMMAND_FLAGS = (
    "--config=experiments/mnist.py",
    "--config.trainer=benchmarks.first_step_trainer:FirstStepTrainer",
    "--config.train.steps_per_loop=1",
    f"--config.data.global_batch_size={ROWS}",
)

if __name__ == "__main__":
    main()
