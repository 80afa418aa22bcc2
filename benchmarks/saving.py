"""The time that a run loses to saving its checkpoints in the background, MNIST in batches of 64.

    python -m benchmarks.saving

A process trains windows of `--steps` steps, by turns without a checkpoint and with one that is begun
before the first step and whole after the last. What the latter take longer is what a checkpoint costs;
the table says what part of `--interval` steps that is. Other programs on the machine disturb the
processor's time less than the clock's. It fails above `--limit` percent of the clock's.
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

WARM_UPS = 2  # windows that are not counted: the first one traces


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a table, and fails above the limit."""
    flags = parse(arguments)
    clock, processor = np.moveaxis(measured(flags), 2, 0)
    lost = 100 * share(clock, flags.steps, flags.interval)
    print(table(clock, processor, lost, flags), flush=True)
    if lost[0] > flags.limit:
        raise SystemExit(f"Saving costs {lost[0]:.2f} %, more than {flags.limit:g} %.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--processes", type=int, default=3, help="default 3")
    parser.add_argument("--windows", type=int, default=12, help="pairs a process; default 12")
    parser.add_argument("--steps", type=int, default=100, help="of a window; default 100")
    parser.add_argument("--interval", type=int, default=1000, help="default 1000, as ctl's own")
    parser.add_argument("--limit", type=float, default=2.0, help="percent; default 2")
    return parser.parse_args(arguments)


def measured(flags: argparse.Namespace) -> np.ndarray:
    """[processes, windows, 2, 2] seconds, as of `measure`, of a process after the other."""
    found = []
    for process in range(flags.processes):
        print(f"process {process + 1} of {flags.processes}", file=sys.stderr, flush=True)
        spawn = multiprocessing.get_context("spawn")  # TensorFlow does not outlive a fork
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
            found.append(pool.submit(measure, flags.windows, flags.steps).result())
    return np.array(found)


def measure(windows: int, steps: int) -> list[list[tuple[float, float]]]:
    """Seconds of each pair of windows, with a checkpoint and without: the clock's, the processor's."""
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
    """Seconds of so many steps, and of a checkpoint written beside them if one is asked for."""
    start, worked = time.perf_counter(), time.process_time()
    if saves:
        controller.save_checkpoint()
    controller.train(controller.step + steps, checkpoint_at_completion=False)
    controller.wait_for_checkpoint()
    return time.perf_counter() - start, time.process_time() - worked


def share(seconds: np.ndarray, steps: int, interval: int) -> np.ndarray:
    """What part of the time saving takes: the median, and the ends of its 95 % interval.

    Args:
        seconds: [processes, windows, 2], with a checkpoint and without.
        steps: of a window.
        interval: steps between two checkpoints.
    """
    ratios = seconds[..., 0] / seconds[..., 1]
    return (np.array(report.interval(ratios)) - 1) * steps / interval


def table(clock: np.ndarray, processor: np.ndarray, lost: np.ndarray, flags) -> str:
    """What was measured, in markdown."""
    cost, worked = (1e3 * np.median(s[..., 0] - s[..., 1]) for s in (clock, processor))
    return "\n".join(
        [
            f"| MNIST, batch 64, {clock[..., 0].size} pairs of {flags.steps} steps | |",
            "|---|---:|",
            f"| ms a step without saving | {1e3 * np.median(clock[..., 1]) / flags.steps:.2f} |",
            f"| ms that a checkpoint costs; of the processor | {cost:.0f}; {worked:.0f} |",
            f"| % lost at every {flags.interval} steps (95 %) "
            f"| {lost[0]:.2f} ({lost[1]:.2f} to {lost[2]:.2f}) |",
        ]
    )


if __name__ == "__main__":
    main()
