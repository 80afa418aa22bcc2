"""Compares the speed of ctl's loops with hand-written loops and Keras' fit.

    python -m benchmarks.loops --quick

First it checks that ctl and the hand-written loop end with the same weights. Then, `--processes`
times, it starts one process per variant. Only one of them trains at a time, for a window of
`--seconds`, while the others wait. Windows alternate between the variants, in a different order each
round, so that other load on the machine affects all variants equally. The speed of ctl in a window is
divided by that of each other variant in the same round. Tables go to stdout, progress to stderr. It
fails if ctl's peak memory is more than 1.1 times that of the faster hand-written loop.
"""

import argparse
import contextlib
import functools
import os
import pathlib
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # the processes share one GPU

import numpy as np
import tensorflow as tf

from benchmarks import flags as command_line
from benchmarks import models, report, same, variants, windows

DEFAULT = f"{variants.CTL}off"  # the program that the pages call ctl
LABELS = {
    DEFAULT: "ctl",
    variants.LOOP: "a hand-written `tf.range` loop",
    variants.TUTORIAL: "the tutorials' loop, one call per step",
    variants.OWN_LOOP: "`ctl.Step` in a `tf.range` loop of your own",
    "tf_keras fit": "tf_keras `model.fit`",
}
ON_CPU = [DEFAULT, f"{DEFAULT}{variants.KERAS_3}", variants.OWN_LOOP, variants.TUTORIAL]
ON_CPU += [variants.LOOP, *variants.FITS]
WITH_XLA = [f"{variants.CTL}{mode}" for mode in ("step", "loop", f"loop{variants.RESIDENT}")]
WITH_XLA += [variants.LOOP_XLA]
MAX_MEMORY_RATIO = 1.1  # of ctl's peak memory to that of the best hand-written loop


def main(arguments: list[str] | None = None) -> None:
    """Measures the variants; prints tables and writes the requested file."""
    flags = parse(arguments)
    subprocess.run([sys.executable, "-m", same.__spec__.name], check=True)
    # XLA is slow on a CPU.
    names = flags.variants or ON_CPU + (WITH_XLA if models.GPU or flags.all else [])
    counts = {"processes": flags.processes, "windows": flags.windows, "seconds": flags.seconds}
    rows, too_much = [], []
    for model in flags.models:
        start = {name: functools.partial(worker, name, model) for name in names}
        rates, peaks = windows.measure(start, title=model, **counts)
        reference = best_loop(rates)
        rows += report.make_rows(model, models.MODELS[model].batch, rates, DEFAULT)
        too_much += [
            f"{model}: {name} uses {peak:.0f} MiB, {reference} {peaks[reference]:.0f} MiB"
            for name, peak in peaks.items()
            if name.startswith(variants.CTL) and peak > MAX_MEMORY_RATIO * peaks[reference]
        ]
    labels = {name: LABELS.get(name, name) for name in names}
    report.show(rows, DEFAULT, labels, flags.result, packages=["tensorflow-cpu", "tf-keras"])
    if too_much:
        raise SystemExit("Too much memory. " + "; ".join(too_much))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line, with the defaults of a quick or a complete run."""
    flags = command_line.parse(
        __doc__,
        arguments,
        choices={"models": models.MODELS},
        quick=False,
        all=False,
        models=["empty", "mnist64", "mnist256"],
        variants=[""],
        processes=3,
        windows=12,
        seconds=0.6,
        result=pathlib.Path,
    )
    flags.variants = [name for name in flags.variants if name]
    if flags.quick:  # under 5 minutes on 2 cores
        flags.processes, flags.windows, flags.seconds = 1, 5, 0.5
    if flags.variants and not {DEFAULT} < {*flags.variants} & {DEFAULT, *variants.REFERENCES}:
        loops = " or ".join(map(repr, variants.REFERENCES))
        raise SystemExit(f"--variants must include {DEFAULT!r} and {loops}")
    return flags


def worker(name: str, model: str) -> contextlib.AbstractContextManager[subprocess.Popen]:
    """Starts a process that trains a variant on request."""
    return windows.worker([sys.executable, "-m", "benchmarks.loops", "--worker", name, model])


def best_loop(rates: dict[str, list[list[float]]]) -> str:
    """Returns the name of the fastest hand-written loop."""
    return max(variants.REFERENCES, key=lambda name: np.median(rates.get(name, 0.0)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        tf.get_logger().setLevel("ERROR")
        variant, trained = sys.argv[2:]
        windows.serve(lambda tick: variants.run(variant, models.MODELS[trained], tick))
    else:
        main()
