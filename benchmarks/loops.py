"""The speed of ctl's loops beside loops written by hand and Keras' fit, in one interleaved run.

    python -m benchmarks.loops --quick

First it asserts that ctl and the hand-written loop end with the same weights. Then, `--processes`
times, it starts a process for every variant; these stand still but for one, which trains for a
window of `--seconds`; windows go round over the variants, each round in another order, so that
whatever else the machine does falls on all alike. A window's speed is divided by that of the best
hand-written loop in the same round. The tables go to stdout, progress to stderr. It fails if ctl's
peak memory is more than 1.1 times the hand-written loop's.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # the processes share one GPU

import numpy as np
import tensorflow as tf

from benchmarks import models, report, same, variants
from ctl.configs import compatibility
from ctl.errors import UsageError
from ctl.replica import xla as replica_compile

WARM_UPS = 2  # windows that are not counted: the first one traces
MEMORY = 1.1  # ctl's peak memory may be so many times the best hand-written loop's


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints, and writes what was asked for."""
    flags = parse(arguments)
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", same.__spec__.name], check=True)
    names = flags.variants or chosen(xla=models.GPU or flags.all)
    lines, too_much = [], []
    for model in flags.models:
        rates, peaks = measure(model, names, flags)
        reference = best_loop(rates)
        found = report.rows(model, models.MODELS[model].batch, rates, peaks, reference)
        print(f"\n{report.table(found, reference)}", flush=True)
        too_much += [
            f"{model}: {name} takes {peak:.0f} MiB, {reference} {peaks[reference]:.0f}"
            for name, peak in peaks.items()
            if name.startswith(variants.CTL) and peak > MEMORY * peaks[reference]
        ]
        lines += found
    print(f"\n{where()}, {flags.processes} processes of {flags.windows} windows a variant.")
    progress(f"{time.monotonic() - start:.0f} s in all.")
    if flags.json:
        report.write_json(flags.json, lines)
    if flags.chart:
        print(report.write_chart(flags.chart, lines))
    if too_much:
        raise SystemExit("Too much memory. " + "; ".join(too_much))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, with the defaults of a quick or a whole run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loops", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="under 5 minutes on 2 cores")
    parser.add_argument("--resnet", action="store_true", help="ResNet-50 too; slow without a GPU")
    parser.add_argument("--all", action="store_true", help="XLA without a GPU too")
    parser.add_argument("--models", nargs="+", choices=models.MODELS, help="instead of the default")
    parser.add_argument("--variants", nargs="+", help="names as in the table")
    parser.add_argument("--processes", type=int, help="of each variant; default 3")
    parser.add_argument("--windows", type=int, help="of each process; default 12")
    parser.add_argument("--seconds", type=float, help="of a window; default 0.6")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="a line a variant")
    parser.add_argument("--chart", type=pathlib.Path, metavar="FILE", help="a PNG, by matplotlib")
    flags = parser.parse_args(arguments)
    default = (1, 5, 0.5) if flags.quick else (3, 12, 0.6)
    for name, value in zip(("processes", "windows", "seconds"), default, strict=True):
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    resnet = ["resnet50"] if flags.resnet else []
    flags.models = flags.models or ["empty", "mnist64", "mnist256", *resnet]
    if flags.variants and not set(flags.variants) & set(variants.REFERENCES):
        parser.error(f"--variants wants {' or '.join(map(repr, variants.REFERENCES))} among them")
    return flags


def chosen(*, xla: bool) -> list[str]:
    """The variants for this hardware: XLA slows small networks on a CPU, so only if asked for."""
    modes = [mode for mode in replica_compile.MODES if mode != "auto" and allowed(mode)]
    modes += [f"loop{variants.RESIDENT}"] if "loop" in modes else []
    names = [
        *(variants.CTL + mode for mode in modes if xla or mode == "off"),
        *variants.HAND_WRITTEN,
        *variants.FITS,
        variants.BARE,
        variants.BARE_XLA,
    ]
    return [name for name in names if xla or name not in variants.WITH_XLA]


def allowed(mode: str) -> bool:
    """Whether one replica may run in this mode."""
    try:
        compatibility.check(compatibility.Choice(xla=mode))
    except UsageError:
        return False
    return True


def measure(
    model: str, names: list[str], flags: argparse.Namespace
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Steps per second, variant -> processes -> windows, and peak memory, variant -> MiB."""
    rates: dict[str, list[list[float]]] = {name: [] for name in names}
    peaks = dict.fromkeys(names, 0.0)
    for process in range(flags.processes):
        with contextlib.ExitStack() as stack:
            workers = {name: stack.enter_context(worker(name, model)) for name in names}
            for name in names:
                rates[name].append([])
            for window in range(-WARM_UPS, flags.windows):
                progress(f"{model}: process {process + 1}, window {window + 1} of {flags.windows}")
                for name in random.Random(window).sample(names, len(names)):
                    answer = ask(name, workers[name], flags.seconds)
                    peaks[name] = max(peaks[name], answer["peak_mib"])
                    if window >= 0:
                        rates[name][-1].append(answer["steps"] / answer["seconds"])
    return rates, peaks


@contextlib.contextmanager
def worker(name: str, model: str):
    """A process that trains a variant when asked."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.worker", name, model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(name: str, process: subprocess.Popen, seconds: float) -> dict[str, float]:
    """Has a process train for one window."""
    with contextlib.suppress(BrokenPipeError):
        print(seconds, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"'{name}' ended early: what it printed is above.")
    return json.loads(answer)


def best_loop(rates: dict[str, list[list[float]]]) -> str:
    """The fastest of the loops written by hand."""
    return max(variants.REFERENCES, key=lambda name: np.median(rates.get(name, 0.0)))


def where() -> str:
    """The hardware in a few words."""
    devices = tf.config.list_physical_devices("GPU")
    names = [
        tf.config.experimental.get_device_details(d).get("device_name", "GPU") for d in devices
    ]
    cpus = f"{len(os.sched_getaffinity(0))} CPU cores"
    return f"TensorFlow {tf.__version__}, {', '.join([*names, cpus])}"


def progress(text: str) -> None:
    """Says where the run is."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
