"""Compares the speed of ctl's loops with hand-written loops and Keras' fit.

    python -m benchmarks.loops --quick

First it checks that ctl and the hand-written loop end with the same weights. Then, `--processes`
times, it starts one process per variant. Only one of them trains at a time, for a window of
`--seconds`, while the others wait. Windows alternate between the variants, in a different order each
round, so that other load on the machine affects all variants equally. The speed of a window is
divided by that of the best hand-written loop in the same round. Tables go to stdout, progress to
stderr. It fails if ctl's peak memory is more than 1.1 times that of the hand-written loop.
"""

import argparse
import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # the processes share one GPU

import numpy as np
import tensorflow as tf

from benchmarks import models, report, results, same, variants, windows
from ctl.configs import keys, overrides
from ctl.errors import UsageError
from ctl.update.config import XLA_MODES

DEFAULT = f"{variants.CTL}off"  # the program that the pages call ctl
LABELS = {
    DEFAULT: "ctl",
    variants.LOOP: "a hand-written `tf.range` loop",
    variants.TUTORIAL: "the tutorials' loop, one call per step",
    variants.OWN_LOOP: "`ctl.Step` in a `tf.range` loop of your own",
    variants.OWN_CALLS: "`ctl.Step`, one call per step",
    "tf_keras fit": "tf_keras `model.fit`",
}
MAX_MEMORY_RATIO = 1.1  # of ctl's peak memory to that of the best hand-written loop


def main(arguments: list[str] | None = None) -> None:
    """Measures the variants; prints tables and writes the requested files."""
    flags = parse(arguments)
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", same.__spec__.name], check=True)
    names = flags.variants or default_variants(xla=models.GPU or flags.all)
    all_rows, too_much, to_ctl = [], [], []
    for model in flags.models:
        rates, peaks = measure(model, names, flags)
        reference = best_loop(rates)
        rows = report.make_rows(model, models.MODELS[model].batch, rates, peaks, reference)
        print(f"\n{report.table(rows, reference)}", flush=True)
        too_much += [
            f"{model}: {name} uses {peak:.0f} MiB, {reference} {peaks[reference]:.0f} MiB"
            for name, peak in peaks.items()
            if name.startswith(variants.CTL) and peak > MAX_MEMORY_RATIO * peaks[reference]
        ]
        all_rows += rows
        if flags.result:
            to_ctl += report.make_rows(model, models.MODELS[model].batch, rates, peaks, DEFAULT)
    print(
        f"\n{describe_hardware()}, {flags.processes} processes of {flags.windows} windows per variant."
    )
    windows.print_progress(f"{time.monotonic() - start:.0f} s in total.")
    if flags.json:
        report.write_json(flags.json, all_rows)
    if flags.result:
        results.save(
            flags.result,
            report.result_tables(to_ctl, DEFAULT, {name: LABELS.get(name, name) for name in names}),
            samples=f"medians of {flags.processes * flags.windows} windows in {flags.processes} starts, "
            "95 % intervals",
            packages=["tensorflow-cpu", "tf-keras"],
        )
    if flags.chart:
        print(report.write_chart(flags.chart, all_rows))
    if too_much:
        raise SystemExit("Too much memory. " + "; ".join(too_much))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line, with the defaults of a quick or a complete run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loops", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="under 5 minutes on 2 cores")
    parser.add_argument(
        "--resnet", action="store_true", help="also measure ResNet-50; slow without a GPU"
    )
    parser.add_argument("--all", action="store_true", help="also measure XLA without a GPU")
    parser.add_argument("--models", nargs="+", choices=models.MODELS, help="models to measure")
    parser.add_argument("--variants", nargs="+", help="variants to measure, named as in the table")
    parser.add_argument("--processes", type=int, help="processes per variant; default 3")
    parser.add_argument("--windows", type=int, help="windows per process; default 12")
    parser.add_argument("--seconds", type=float, help="seconds per window; default 0.6")
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write one JSON line per variant"
    )
    results.add_flag(parser)
    parser.add_argument(
        "--chart", type=pathlib.Path, metavar="FILE", help="write a PNG (requires matplotlib)"
    )
    flags = parser.parse_args(arguments)
    default = (1, 5, 0.5) if flags.quick else (3, 12, 0.6)
    for name, value in zip(("processes", "windows", "seconds"), default, strict=True):
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    resnet = ["resnet50"] if flags.resnet else []
    flags.models = flags.models or ["empty", "mnist64", "mnist256", *resnet]
    if flags.result and flags.variants and DEFAULT not in flags.variants:
        parser.error(f"--variants must include {DEFAULT!r} with --result")
    if flags.variants and not set(flags.variants) & set(variants.REFERENCES):
        parser.error(f"--variants must include {' or '.join(map(repr, variants.REFERENCES))}")
    return flags


def default_variants(*, xla: bool) -> list[str]:
    """Returns the variants to measure; with XLA only if `xla`, since it is slow on a CPU."""
    modes = [mode for mode in XLA_MODES if mode != "auto" and is_supported(mode)]
    modes += [f"loop{variants.RESIDENT}"] if "loop" in modes else []
    names = [
        *(variants.CTL + mode for mode in modes if xla or mode == "off"),
        f"{variants.CTL}off{variants.KERAS_3}",
        variants.OWN_LOOP,
        variants.OWN_CALLS,
        *variants.HAND_WRITTEN,
        *variants.FITS,
        variants.BARE,
        variants.BARE_XLA,
    ]
    return [name for name in names if xla or name not in variants.WITH_XLA]


def is_supported(mode: str) -> bool:
    """Whether a single replica supports this mode."""
    try:
        config = overrides.config(trainer="a.py:A", data=dict(global_batch_size=64))
        keys.check_rules(overrides.flatten(config) | {"runtime.xla": mode}, replicas=1)
    except UsageError:
        return False
    return True


def measure(
    model: str, names: list[str], flags: argparse.Namespace
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Returns variant -> processes -> windows -> steps per second, and variant -> peak MiB."""
    return windows.measure(
        {name: functools.partial(worker, name, model) for name in names},
        title=model,
        processes=flags.processes,
        windows=flags.windows,
        seconds=flags.seconds,
    )


def worker(name: str, model: str) -> contextlib.AbstractContextManager[subprocess.Popen]:
    """Starts a process that trains a variant on request."""
    return windows.worker([sys.executable, "-m", "benchmarks.worker", name, model])


def best_loop(rates: dict[str, list[list[float]]]) -> str:
    """Returns the name of the fastest hand-written loop."""
    return max(variants.REFERENCES, key=lambda name: np.median(rates.get(name, 0.0)))


def describe_hardware() -> str:
    devices = tf.config.list_physical_devices("GPU")
    names = [
        tf.config.experimental.get_device_details(d).get("device_name", "GPU") for d in devices
    ]
    cpus = f"{len(os.sched_getaffinity(0))} CPU cores"
    return f"TensorFlow {tf.__version__}, {', '.join([*names, cpus])}"


if __name__ == "__main__":
    main()
