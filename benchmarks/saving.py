"""Measures the time that a run loses to saving checkpoints in the background (MNIST, batch 64).

    python -m benchmarks.saving

A process trains windows of `--steps` steps, alternately without a checkpoint and with one that is
started before the first step and complete after the last. The additional time of the latter is the
cost of a checkpoint; the table shows it as a percentage of the time of `--interval` steps. It shows
wall time and CPU time, which other programs on the machine affect less. It fails if saving takes more
than `--limit` percent of the wall time.
"""

import argparse
from collections.abc import Sequence
import concurrent.futures
import multiprocessing
import os
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import models, report, variants
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.controller import Controller

WARM_UPS = 2  # windows that are not counted: the first one includes tracing


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a table, and fails above the limit."""
    flags = parse(arguments)
    wall, cpu = np.moveaxis(measure_processes(flags), 2, 0)
    percent = 100 * saving_fraction(wall, flags.steps, flags.interval)
    print(table(wall, cpu, percent, flags), flush=True)
    if percent[0] > flags.limit:
        raise SystemExit(f"Saving takes {percent[0]:.2f} %, more than {flags.limit:g} %.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--processes", type=int, default=3, help="default 3")
    parser.add_argument(
        "--windows", type=int, default=12, help="pairs of windows per process; default 12"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps per window; default 100")
    parser.add_argument(
        "--interval",
        type=int,
        default=1000,
        help="steps between checkpoints; default 1000, as in ctl",
    )
    parser.add_argument("--limit", type=float, default=2.0, help="percent; default 2")
    return parser.parse_args(arguments)


def measure_processes(flags: argparse.Namespace) -> np.ndarray:
    """Runs `measure` in one process after the other; returns [processes, windows, 2, 2] seconds."""
    results = []
    for process in range(flags.processes):
        print(f"process {process + 1} of {flags.processes}", file=sys.stderr, flush=True)
        spawn = multiprocessing.get_context("spawn")  # TensorFlow does not work after a fork
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
            results.append(pool.submit(measure, flags.windows, flags.steps).result())
    return np.array(results)


def measure(windows: int, steps: int) -> list[list[tuple[float, float]]]:
    """Returns (wall, CPU) seconds of each pair of windows, with and without a checkpoint.

    The shape is [windows, wall or CPU, with or without].
    """
    tf.get_logger().setLevel("ERROR")
    model = models.MODELS["mnist64"]
    trainer = variants.Trainer(model, optimizer=lambda: model.optimizer(tf_keras))
    with tempfile.TemporaryDirectory(prefix="ctl-saving-") as folder:
        checkpoints = Checkpointer(folder, trainer, background=True)
        controller = Controller(trainer=trainer, steps_per_loop=steps, checkpoints=checkpoints)
        pairs = []
        for window in range(-WARM_UPS, windows):
            order = (True, False) if window % 2 else (False, True)
            pair = {saves: one_window(controller, steps, saves=saves) for saves in order}
            if window >= 0:
                pairs.append(list(zip(pair[True], pair[False], strict=True)))
    return pairs


def one_window(controller: Controller, steps: int, *, saves: bool) -> tuple[float, float]:
    """Returns (wall, CPU) seconds of a window, including a checkpoint if `saves`."""
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    if saves:
        controller.save_checkpoint()
    controller.train(controller.step + steps, checkpoint_at_completion=False)
    return time.perf_counter() - wall_start, time.process_time() - cpu_start


def saving_fraction(seconds: np.ndarray, steps: int, interval: int) -> np.ndarray:
    """Returns the fraction of time that saving takes: the median and its 95 % interval.

    Args:
        seconds: [processes, windows, 2], with and without a checkpoint.
        steps: steps per window.
        interval: steps between two checkpoints.
    """
    ratios = seconds[..., 0] / seconds[..., 1]
    return (np.array(report.interval(ratios)) - 1) * steps / interval


def table(wall: np.ndarray, cpu: np.ndarray, percent: np.ndarray, flags: argparse.Namespace) -> str:
    """Formats the result as a markdown table."""
    wall_ms, cpu_ms = (1e3 * np.median(s[..., 0] - s[..., 1]) for s in (wall, cpu))
    return "\n".join(
        [
            f"| MNIST, batch 64, {wall[..., 0].size} pairs of {flags.steps} steps | |",
            "|---|---:|",
            f"| ms per step without saving | {1e3 * np.median(wall[..., 1]) / flags.steps:.2f} |",
            f"| ms per checkpoint: wall; CPU | {wall_ms:.0f}; {cpu_ms:.0f} |",
            f"| % of the time, saving every {flags.interval} steps (95 %) "
            f"| {percent[0]:.2f} ({percent[1]:.2f} to {percent[2]:.2f}) |",
        ]
    )


if __name__ == "__main__":
    main()
