"""Measures the seconds and the bytes of a step by how several workers send their gradients.

    python -m benchmarks.packs --workers 2 4 --rates 1000 10000 none --sizes 4 32 128 none
    python -m benchmarks.packs --workers 2 --rates 100 --sizes 32 --compression float16

The workers are on simulated hosts (`benchmarks.network.namespaces`), which requires Linux, root and
iproute2, and share the cores and the memory of this machine. They train 80 dense layers of 1,024 units,
divided by the number of workers: the gradients of two workers are 160 MiB. The steps of all sizes
alternate in the same processes, and the size "none" sends all gradients at once. After each window the
weights of all sizes must be equal: with two workers bit for bit, with more of them up to the rounding of
sums in another order. A compression adds steps with compressed gradients, in packs of the first size.
"""

import argparse
from collections.abc import Sequence
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks import flags as command_line
from benchmarks import results, windows
from benchmarks.network.measure import _ROOT
from benchmarks.network.namespaces import Hosts

LAYERS, WIDTH, ROWS = 80, 1024, 8  # of all workers together; rows per worker
_EVERYTHING = 2**20  # MiB


def main(arguments: Sequence[str] | None = None) -> list[list]:
    """Measures and prints the rows of the table; returns them."""
    flags = command_line.parse(
        __doc__,
        arguments,
        workers=[2, 4],
        rates=[1000.0, 10000.0, None],
        sizes=[4.0, 32.0, 128.0, None],
        compression="",
        windows=7,
        steps=2,
        layers=LAYERS,
        width=WIDTH,
        worker=False,
        result=pathlib.Path,
    )
    if flags.worker:
        work(flags.layers, flags.width)
        return []
    forms = [(size, "") for size in flags.sizes]
    forms += [(flags.sizes[0], flags.compression)] if flags.compression else []
    rows = []
    for workers in flags.workers:
        for rate, measured in measure(workers, forms, flags).items():
            shown = "no limit" if rate is None else f"{rate / 1000:g} Gbit/s"
            size = 4 * flags.layers // workers * (flags.width + 1) * flags.width / 2**20
            seconds = [_median_and_range([s for s, _ in each]) for each in measured]
            sent = [round(statistics.median(mib for _, mib in each), 2) for each in measured]
            rows.append([workers, round(size), shown, *seconds])
            print(rows[-1], "MiB sent:", sent, flush=True)
            rows[-1] += sent if flags.compression else []
    if flags.result:
        names = ["all at once" if s is None else f"{s:g} MiB {c}".strip() for s, c in forms]
        columns = [("workers", 0), ("gradients, MiB", 0), ("link", None)]
        columns += [(f"{name}, s per step", 2) for name in names]
        columns += [(f"{name}, MiB sent", 2) for name in names if flags.compression]
        results.save(
            flags.result,
            {"seconds": results.Table(columns, rows)},
            samples=f"medians and ranges of {flags.windows} windows, workers that share the cores",
            packages=["tensorflow-cpu"],
        )
    return rows


def measure(workers: int, forms: Sequence[tuple], flags: argparse.Namespace) -> dict:
    """Measures the windows of some workers.

    Returns:
        Rate of the links -> one list per form -> the seconds and the MiB sent per step of each window.
    """
    command = [sys.executable, "-m", "benchmarks.packs", "--worker"]
    command += [f"--layers={flags.layers // workers}", f"--width={flags.width}"]
    measured = {rate: [[] for _ in forms] for rate in flags.rates}
    with Hosts(workers) as hosts:
        processes = hosts.start(
            command,
            environment={**os.environ, "PYTHONPATH": str(_ROOT)},
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for form in forms:
            _train(processes, form, 1)  # traces the step
        for window in range(flags.windows):
            for rate, lists in measured.items():
                hosts.limit(rate)
                weights = []
                # In turns, so that no form is always the first one after a change of the rate.
                for place in ((window + i) % len(forms) for i in range(len(forms))):
                    before = hosts.traffic()[0].sent
                    answer = _train(processes, forms[place], flags.steps)
                    mib = (hosts.traffic()[0].sent - before) / flags.steps / 2**20
                    lists[place].append((answer["seconds"], mib))
                    weights += [] if forms[place][1] else [answer["weights"]]
                _check(weights, exact=workers == 2)
    return measured


def _train(processes: Sequence[subprocess.Popen], form: tuple, steps: int) -> dict:
    """Trains on all workers; returns the answer of the slowest one."""
    size, compression = form
    for process in processes:
        line = json.dumps([size or _EVERYTHING, compression, steps])
        print(line, file=process.stdin, flush=True)
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
    """Trains as lines of stdin request, [MiB of a pack, compression, steps]; answers each by JSON."""
    with windows.answers_only() as answers:
        import tensorflow as tf

        from ctl.hardware import engines, selection
        from ctl.hardware.strategies import StrategyOptions

        tf.get_logger().setLevel("ERROR")
        options = StrategyOptions(
            cluster=engines.from_environment(os.environ), heartbeat_timeout=600.0
        )
        strategy = selection.build("multi_worker_mirrored", options).strategy
        trainers = {}
        for line in sys.stdin:
            size, compression, steps = json.loads(line)
            key = size, compression
            if key not in trainers:
                strategy.extended._communication_options.bytes_per_pack = round(size * 2**20)
                trainers[key] = _make_trainer(strategy, layers, width, compression)
            start = time.perf_counter()
            trainers[key].train(tf.constant(steps))
            seconds = (time.perf_counter() - start) / steps
            variables = trainers[key].model.variables
            sums = [float(np.sum(v.numpy(), dtype=np.float64)) for v in variables]
            print(json.dumps({"seconds": seconds, "weights": sums}), file=answers, flush=True)
        os._exit(0)  # the servers of the workers would wait for each other


def _make_trainer(strategy, layers: int, width: int, compression: str):
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
        options=ctl.TrainerOptions(**({"compression": compression} if compression else {})),
    )


if __name__ == "__main__":
    main()
