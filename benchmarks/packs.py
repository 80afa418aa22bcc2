"""Measures the seconds of a step by the size of the packs in which several workers send gradients.

    python -m benchmarks.packs --workers 2 4 --rates 1000 10000 none --sizes 4 32 128 none

The workers are on simulated hosts (`benchmarks.network.namespaces`), which requires Linux, root and
iproute2, and share the cores and the memory of this machine. They train 80 dense layers of 1,024 units,
divided by the number of workers: the gradients of two workers are 160 MiB. The steps of all sizes
alternate in the same processes, and the size "none" sends all gradients at once. After each window the
weights of all sizes must be equal: with two workers bit for bit, with more of them up to the rounding of
sums in another order.
"""

import argparse
from collections.abc import Sequence
import json
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks import results
from benchmarks.network.measure import _ROOT
from benchmarks.network.namespaces import Hosts

LAYERS, WIDTH, ROWS = 80, 1024, 8  # of all workers together; rows per worker
_EVERYTHING = 2**20  # MiB


def main(arguments: Sequence[str] | None = None) -> list[list]:
    """Measures and prints the rows of the table; returns them."""
    flags = _parse(arguments)
    if flags.worker:
        work(flags.layers, flags.width)
        return []
    rows = []
    for workers in flags.workers:
        for rate, seconds in measure(workers, flags).items():
            shown = "no limit" if rate is None else f"{rate / 1000:g} Gbit/s"
            size = 4 * flags.layers // workers * (flags.width + 1) * flags.width / 2**20
            rows.append([workers, round(size), shown, *map(_median_and_range, seconds)])
            print(rows[-1], flush=True)
    if flags.result:
        sizes = ["all at once" if s is None else f"{s:g} MiB" for s in flags.sizes]
        columns = [("workers", 0), ("gradients, MiB", 0), ("link", None)]
        columns += [(f"{size}, s per step", 2) for size in sizes]
        results.save(
            flags.result,
            {"seconds": results.Table(columns, rows)},
            samples=f"medians and ranges of {flags.windows} windows, workers that share the cores",
            packages=["tensorflow-cpu"],
        )
    return rows


def measure(workers: int, flags: argparse.Namespace) -> dict[float | None, list[list[float]]]:
    """Returns the seconds per step of each window: rate of the links -> one list per size."""
    command = [sys.executable, "-m", "benchmarks.packs", "--worker"]
    command += [f"--layers={flags.layers // workers}", f"--width={flags.width}"]
    seconds = {rate: [[] for _ in flags.sizes] for rate in flags.rates}
    with Hosts(workers) as hosts:
        processes = hosts.start(
            command,
            environment={**os.environ, "PYTHONPATH": str(_ROOT)},
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for size in flags.sizes:
            _train(processes, size, 1)  # traces the step
        for window in range(flags.windows):
            for rate, lists in seconds.items():
                hosts.limit(rate)
                answers = {}
                # In turns, so that no size is always the first one after a change of the rate.
                order = [(window + i) % len(flags.sizes) for i in range(len(flags.sizes))]
                for place in order:
                    answers[place] = _train(processes, flags.sizes[place], flags.steps)
                    lists[place].append(answers[place]["seconds"])
                _check([a["weights"] for a in answers.values()], exact=workers == 2)
    return seconds


def _train(processes: Sequence[subprocess.Popen], size: float | None, steps: int) -> dict:
    """Trains on all workers; returns the answer of the slowest one."""
    for process in processes:
        print(json.dumps([size or _EVERYTHING, steps]), file=process.stdin, flush=True)
    lines = [process.stdout.readline() for process in processes]
    if not all(lines):
        raise SystemExit("A worker has failed; its error is above.")
    return max(map(json.loads, lines), key=lambda answer: answer["seconds"])


def _check(weights: Sequence[Sequence[float]], *, exact: bool) -> None:
    first, *others = np.array(weights)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0, atol=0 if exact else 1e-3)


def _median_and_range(values: Sequence[float]) -> list[float]:
    return [round(each, 3) for each in (statistics.median(values), min(values), max(values))]


def work(layers: int, width: int) -> None:
    """Trains as lines of stdin request, [MiB of a pack, steps]; answers each by a line of JSON."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps other output out of the answers
    import tensorflow as tf

    from ctl.hardware import engines, selection
    from ctl.hardware.strategies import StrategyOptions

    tf.get_logger().setLevel("ERROR")
    options = StrategyOptions(cluster=engines.from_environment(os.environ), heartbeat_timeout=600.0)
    strategy = selection.build("multi_worker_mirrored", options).strategy
    trainers = {}
    for line in sys.stdin:
        size, steps = json.loads(line)
        if size not in trainers:
            strategy.extended._communication_options.bytes_per_pack = round(size * 2**20)
            trainers[size] = _make_trainer(strategy, layers, width)
        start = time.perf_counter()
        trainers[size].train(tf.constant(steps))
        seconds = (time.perf_counter() - start) / steps
        sums = [float(np.sum(v.numpy(), dtype=np.float64)) for v in trainers[size].model.variables]
        print(json.dumps({"seconds": seconds, "weights": sums}), file=answers, flush=True)
    os._exit(0)  # the servers of the workers would wait for each other


def _make_trainer(strategy, layers: int, width: int):
    import tensorflow as tf
    import tf_keras

    import ctl

    class Trainer(ctl.StandardTrainer):
        def build_model(self):
            hidden = [tf_keras.layers.Dense(width, "relu") for _ in range(layers)]
            return tf_keras.Sequential(
                [tf_keras.Input([width]), *hidden, tf_keras.layers.Dense(10)]
            )

        def build_dataset(self, split, input_context):
            draw = np.random.default_rng(0)
            x = draw.standard_normal((64, width), np.float32)
            return ctl.data.arrays({"x": x, "label": draw.integers(0, 10, 64)})

        def per_example_loss(self, batch, outputs):
            return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], outputs)

    return Trainer(
        strategy=strategy,
        global_batch_size=ROWS * strategy.num_replicas_in_sync,
        optimizer=lambda: tf_keras.optimizers.SGD(0.001),
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    number = lambda text: None if text == "none" else float(text)  # noqa: E731
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument(
        "--rates", nargs="+", type=number, default=[1000.0, 10000.0, None], metavar="MBITS"
    )
    parser.add_argument(
        "--sizes", nargs="+", type=number, default=[4.0, 32.0, 128.0, None], metavar="MIB"
    )
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps per window")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    results.add_flag(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
