"""Measures what observing costs: MNIST with everything on against the bare run.

    python -m benchmarks.observing

One process trains two runs of experiments/mnist.py in alternating windows of `--steps` steps, in a
different order each time, so that other load on the machine affects both equally. The bare run writes
nothing. The observed run has the average of the weights, best checkpoints, early stopping,
metrics.jsonl and TensorBoard summaries; it is evaluated after each window, and its report is written.
Evaluations, checkpoints and the report are not part of the windows, since the bare run has none. The
table shows the ratio of the examples/s, in wall time and in CPU time, which other programs on the
machine affect less. The benchmark fails if the median in wall time is below 1 - `--limit` %.
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from ctl.commands import report
from ctl.configs import loading, overrides
from ctl.loop.controller import Controller
from ctl.loop.progress import Progress
from ctl.loop.workdir import Workdir
from ctl.modes import Arguments
from ctl.modes.run import Run

CONFIG = "experiments/mnist.py"
BARE = {"summaries.writers": "[]", "train.checkpoint_interval": "0"}
OBSERVED = {
    "train.checkpoint_interval": "0",
    "optimizer.ema_decay": "0.999",
    "train.best.metric": "eval/accuracy",
    "train.best.mode": "max",
    "train.best.patience": "1000000",
    "eval.interval": "100000",  # the windows are evaluated by hand
}
WARM_UPS = 2  # windows that are not counted: the first one includes tracing


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a table, and fails above the limit."""
    flags = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="ctl-observing-") as folder:
        seconds = measure(pathlib.Path(folder), flags)
    print(table(seconds, flags), flush=True)
    median = np.median(seconds[:, 0, 0] / seconds[:, 1, 0])
    if median < 1 - flags.limit / 100:
        raise SystemExit(
            f"Observing costs {100 * (1 - median):.2f} %, more than {flags.limit:g} %."
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observing", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--windows", type=int, default=20, help="pairs of windows; default 20")
    parser.add_argument("--steps", type=int, default=200, help="steps per window; default 200")
    parser.add_argument("--limit", type=float, default=3.0, help="percent; default 3")
    return parser.parse_args(arguments)


def measure(folder: pathlib.Path, flags: argparse.Namespace) -> np.ndarray:
    """Returns the seconds of each pair of windows, [windows, bare or observed, wall or CPU]."""
    steps = (WARM_UPS + flags.windows) * flags.steps
    bare = make_controller(folder / "bare", BARE | {"train.steps": str(steps)})
    observed = make_controller(folder / "observed", OBSERVED | {"train.steps": str(steps)})
    rows = []
    for window in range(-WARM_UPS, flags.windows):
        order = (bare, observed) if window % 2 else (observed, bare)
        seconds = {controller: one_window(controller, flags.steps) for controller in order}
        observed.evaluate()
        if window >= 0:
            rows.append([seconds[bare], seconds[observed]])
    report.main([str(folder / "observed")])
    return np.array(rows)


def make_controller(workdir: pathlib.Path, keys: dict[str, str]) -> Controller:
    """Makes the controller of a run that prints nothing."""
    config = loading.load_config(CONFIG)
    for name, value in keys.items():
        overrides.change(config, name, value)
    run = Run(Arguments(config, CONFIG, Workdir(workdir)))
    run.progress = Progress(total=config.train.steps, write=lambda line: None)
    run.workdir.create(run.config.to_dict())
    controller = run.make_controller(actions=run.make_actions())
    controller.reporter.metrics.begin(run.config.to_dict(), step=0, is_new=True)
    return controller


def one_window(controller: Controller, steps: int) -> tuple[float, float]:
    """Returns the (wall, CPU) seconds of a window."""
    wall, cpu = time.perf_counter(), time.process_time()
    controller.train(controller.step + steps, checkpoint_at_completion=False)
    return time.perf_counter() - wall, time.process_time() - cpu


def table(seconds: np.ndarray, flags: argparse.Namespace) -> str:
    """Formats the result as a markdown table."""
    bare, observed = np.median(seconds[..., 0], axis=0)
    quartiles = np.quantile(seconds[:, 0] / seconds[:, 1], (0.5, 0.25, 0.75), axis=0)
    wall, cpu = ("{:.3f} ({:.3f} to {:.3f})".format(*column) for column in quartiles.T)
    return "\n".join(
        [
            f"| MNIST, {len(seconds)} pairs of {flags.steps} steps | |",
            "|---|---:|",
            f"| ms per step, bare; observed | {1e3 * bare / flags.steps:.2f}; "
            f"{1e3 * observed / flags.steps:.2f} |",
            f"| examples/s, observed / bare (quartiles) | {wall} |",
            f"| the same in CPU time | {cpu} |",
        ]
    )


if __name__ == "__main__":
    main()
