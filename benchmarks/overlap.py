"""Measures the speedup by `runtime.all_reduce.bucket_mib` if computing and reducing take equally long.

    python -m benchmarks.overlap --bucket_mib=1 --rounds=3

Two workers with one core each, on two hosts of `benchmarks.network.namespaces`, train a network of 12
dense layers of 512 units, whose gradients are 12 MiB. Each window first measures the seconds of a step
with unlimited links. It then limits the links to the bandwidth at which sending the gradients takes the
same time, and measures workers that reduce all gradients as one group, and workers that reduce several
groups. All three are measured in each window because the speed of a machine changes over minutes. Every
round starts new processes. After each window the weights of both variants must be the same, bit for bit.
The benchmark requires Linux, root and two cores.
"""

import argparse
from collections.abc import Sequence
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks.network.namespaces import Hosts
from ctl.hardware.cluster import Cluster

LAYERS, WIDTH, ROWS = 12, 512, 5000  # rows per worker
PORT = 2222  # of the first workers; the others use the next one
GRADIENT_BYTES = 4 * (LAYERS * (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10)


class Window(NamedTuple):
    """Seconds per step of the three measurements of a window.

    Attributes:
        computing: with unlimited links.
        one_group: with limited links, where all gradients are reduced as one group.
        groups: with limited links, where they are reduced in several groups.
    """

    computing: float
    one_group: float
    groups: float


class Workers:
    """The two worker processes of one variant; they train when `train` is called."""

    def __init__(self, hosts: Hosts, port: int, bucket_mib: float):
        addresses = {"worker": [f"{address}:{port}" for address in hosts.addresses]}
        cores = sorted(os.sched_getaffinity(0))
        self._processes = []
        for i in range(len(hosts.addresses)):
            core = str(cores[i % len(cores)])
            command = ["taskset", "-c", core, sys.executable, "-m", "benchmarks.overlap"]
            environment = {"TF_CONFIG": Cluster(addresses, "worker", i).tf_config()}
            self._processes.append(
                hosts.popen(
                    i,
                    [*command, f"--worker={bucket_mib}"],
                    env={**os.environ, **environment, "TF_CPP_MIN_LOG_LEVEL": "2"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def train(self, steps: int) -> dict[str, float | str]:
        """Trains on both workers; returns the values of the slower one.

        Returns:
            Seconds per step, and a digest of the weights.
        """
        for process in self._processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for process in self._processes]
        assert len({answer["weights"] for answer in answers}) == 1, answers
        return max(answers, key=lambda answer: answer["seconds"])


def run_round(bucket_mib: float, windows: int, steps: int) -> list[Window]:
    """Starts new processes and measures them.

    Args:
        bucket_mib: the size of the groups in MiB.
        windows: the number of windows of each variant.
        steps: the steps of a window.

    Returns:
        The windows.
    """
    results = []
    with Hosts(2) as hosts:
        variants = [Workers(hosts, PORT + i, size) for i, size in enumerate((0.0, bucket_mib))]
        for workers in variants:  # traces the step
            workers.train(1)
        for i in range(windows):
            hosts.limit(None)
            computing = max(workers.train(steps)["seconds"] for workers in variants)
            hosts.limit(rate(computing))
            order = variants if i % 2 else variants[::-1]
            answers = [workers.train(steps) for workers in order]
            one, groups = answers if i % 2 else answers[::-1]
            if one["weights"] != groups["weights"]:
                raise AssertionError(f"the weights differ after window {i}")
            results.append(Window(computing, one["seconds"], groups["seconds"]))
            print(f"  {results[-1]}", file=sys.stderr)
    return results


def rate(computing: float) -> float:
    """Returns the Mbit/s at which sending the gradients takes `computing` seconds."""
    return 8 * GRADIENT_BYTES / computing / 1e6


def report(rounds: Sequence[Sequence[Window]]) -> list[str]:
    """Returns the lines of a table with one row per round, and one row for all rounds."""
    lines = [
        "| round | computing, s per step | link, Mbit/s | one group, s | groups, s | times as fast |",
        "|---|---:|---:|---:|---:|---:|",
        *(f"| {i + 1} | {_cells(windows)} |" for i, windows in enumerate(rounds)),
    ]
    return [*lines, f"| all | {_cells([window for windows in rounds for window in windows])} |"]


def _cells(windows: Sequence[Window]) -> str:
    computing, one, groups = map(statistics.median, zip(*windows, strict=True))
    ratios = [window.one_group / window.groups for window in windows]
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    seconds = f"{computing:.2f} | {rate(computing):.0f} | {one:.2f} | {groups:.2f}"
    return f"{seconds} | {middle:.2f} ({low:.2f} to {high:.2f})"


def work(bucket_mib: float) -> None:
    """Trains the number of steps that each line of stdin contains; prints a line of JSON for each."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps other output out of the answers
    import tensorflow as tf

    trainer = _make_trainer(bucket_mib)
    for line in sys.stdin:
        start = time.perf_counter()
        trainer.train(tf.constant(int(line)))
        seconds = (time.perf_counter() - start) / int(line)
        digest = hashlib.sha256()
        for variable in trainer.model.trainable_variables:
            digest.update(variable.numpy().tobytes())
        answer = {"seconds": seconds, "weights": digest.hexdigest()}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # the servers of both workers would wait for each other


def _make_trainer(bucket_mib: float):
    import numpy as np
    import tensorflow as tf
    import tf_keras

    import ctl
    from ctl.hardware import engines, selection, strategies

    class Trainer(ctl.StandardTrainer):
        def build_model(self):
            hidden = [tf_keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
            inputs = tf_keras.Input([WIDTH], name="x")
            return tf_keras.Sequential([inputs, *hidden, tf_keras.layers.Dense(10)])

        def build_dataset(self, split, input_context):
            random = np.random.default_rng(0)
            x = random.standard_normal((4 * ROWS, WIDTH), np.float32)
            return ctl.data.arrays({"x": x, "label": random.integers(0, 10, 4 * ROWS)})

        def per_example_loss(self, batch, outputs):
            return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], outputs)

    options = strategies.StrategyOptions(
        bucket_mib=bucket_mib, cluster=engines.from_environment(os.environ)
    )
    strategy = selection.build("multi_worker_mirrored", options).strategy
    return Trainer(
        strategy=strategy,
        global_batch_size=ROWS * strategy.num_replicas_in_sync,
        optimizer=lambda: tf_keras.optimizers.SGD(0.01),
    )


def main(argv: Sequence[str]) -> None:
    """Measures and prints the table, or trains as a worker."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--bucket_mib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; default 3")
    parser.add_argument("--windows", type=int, default=8, help="windows per round; default 8")
    parser.add_argument("--steps", type=int, default=4, help="steps per window; default 4")
    parser.add_argument("--output", type=pathlib.Path, help="the seconds of all windows, as JSON")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.worker is not None:
        work(flags.worker)
    rounds = []
    for i in range(flags.rounds):
        print(f"Round {i + 1} of {flags.rounds}", file=sys.stderr)
        rounds.append(run_round(flags.bucket_mib, flags.windows, flags.steps))
        if flags.output:
            flags.output.write_text(json.dumps(rounds))
    print("\n".join(report(rounds)))


if __name__ == "__main__":
    main(sys.argv[1:])
