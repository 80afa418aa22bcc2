"""Measures the bytes and seconds of a step on a slow network, with and without compressed gradients.

    python -m benchmarks.compression --mbits 100 --compression float16

Two simulated hosts (`benchmarks.network.namespaces`, which requires Linux and root) train the
Transformer of experiments/char_lm.py with 5 million parameters on the source of Python's standard
library. Each process has a trainer without and one with compression, which train alternately. The
ratio of their times is the median over rounds. The bytes are counted by the interface of a host,
headers included.
"""

import argparse
import json
import os
import pathlib
import runpy
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_TRAINER = pathlib.Path(__file__).resolve().parent.parent / "experiments/trainers/char_lm.py"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measures, and prints one line; returns the values of `measure`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compression", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--mbits", type=float, default=100.0, help="rate of each link; default 100")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--compression", default="float16", help="float16 or bfloat16; default float16"
    )
    parser.add_argument(
        "--width", type=int, default=320, help="units of each of the four layers; default 320"
    )
    parser.add_argument("--context", type=int, default=64, help="bytes per example")
    parser.add_argument("--batch", type=int, default=12, help="global batch size")
    parser.add_argument("--steps", type=int, default=5, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--is_worker", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.is_worker:
        return _run_worker(flags)
    row = measure(flags)
    plain, compressed = row["plain"], row["compressed"]
    print(
        f"{flags.workers} workers, {flags.mbits:g} Mbit/s, {row['parameters']:,} parameters: "
        f"{plain['mib']:.3f} MiB sent per step and worker, {compressed['mib']:.3f} MiB with "
        f"{flags.compression} ({plain['mib'] / compressed['mib']:.1f} times fewer); "
        f"{plain['seconds']:.3f} s per step, {compressed['seconds']:.3f} s with it (ratio "
        f"{row['ratio']:.2f}, rounds {min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
    )
    return row


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Runs each worker on a separate simulated host.

    Returns:
        The values that the first worker measured: parameters, the ratio of the seconds of plain and
        compressed steps (`ratio`, and `ratios` by round), and the seconds and MiB per step of each.
    """
    from benchmarks.network.namespaces import Hosts

    values = {k: v for k, v in vars(flags).items() if k != "is_worker"}
    command = [sys.executable, "-m", "benchmarks.compression", "--is_worker"]
    command += [f"--{name}={value}" for name, value in values.items()]
    with Hosts(flags.workers, rate=flags.mbits) as hosts:
        first, *others = hosts.start(command, stdout=subprocess.PIPE, text=True)
        out, _ = first.communicate()
        for process in others:
            process.communicate()
    return json.loads(out.splitlines()[-1])


def _run_worker(flags: argparse.Namespace) -> dict[str, Any]:
    import tensorflow as tf

    from ctl.built.inner_loop import loop_of
    from ctl.hardware import engines, selection
    from ctl.hardware.strategies import StrategyOptions

    options = StrategyOptions(cluster=engines.from_environment(os.environ))
    strategy = selection.build("multi_worker_mirrored", options).strategy
    trainers = [
        _make_trainer(flags, strategy),
        _make_trainer(flags, strategy, compression=flags.compression),
    ]
    seconds: list[list[float]] = [[], []]
    sent: list[list[int]] = [[], []]
    for _ in range(flags.rounds + 1):
        for i, trainer in enumerate(trainers):
            start, before = time.perf_counter(), _count_sent()
            trainer.train(tf.constant(flags.steps))
            seconds[i].append((time.perf_counter() - start) / flags.steps)
            sent[i].append((_count_sent() - before) / flags.steps)
    # The first round is skipped, because it traces the steps and sends the initial weights.
    ratios = [a / b for a, b in zip(*seconds, strict=True)][1:]
    row = {
        "parameters": loop_of(trainers[0]).step.attributes.parameter_count(),
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }
    for name, times, counts in zip(("plain", "compressed"), seconds, sent, strict=True):
        row[name] = {
            "seconds": statistics.median(times[1:]),
            "mib": statistics.median(counts[1:]) / 2**20,
        }
    print(json.dumps(row), flush=True)
    return row


def _make_trainer(flags: argparse.Namespace, strategy: Any, **options: Any) -> Any:
    import tf_keras

    import ctl

    model = {"layers": 4, "heads": 4, "width": flags.width, "context": flags.context}
    return runpy.run_path(str(_TRAINER))["CharLmTrainer"](
        strategy=strategy,
        global_batch_size=flags.batch,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-3),
        options=ctl.TrainerOptions(
            model={**model, "recompute": ""}, data={"dir": ""}, xla="off", **options
        ),
    )


def _count_sent() -> int:
    """Returns the bytes that the interface of this host has sent."""
    lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


if __name__ == "__main__":
    main()
