"""Measures the peak memory and the speed of a step, by micro-batches and recomputation.

    python -m benchmarks.memory --quick
    python -m benchmarks.memory --models convolutions --micro_batches 1 4 16

Every setting runs in a process of its own. On a CPU the peak is that of the resident set, above the
baseline: the process with its model built and its data read, before the first step. So it includes
what tracing needs, which the estimate of `--mode=explain` in the next column does not. On a GPU it is
the peak of TensorFlow's allocator, above the same baseline (`tf.config.experimental.get_memory_info`).
The processes of a model train alternately, one at a time, so that other load on the machine affects all
of them equally; the time of a step is the median over rounds of its ratio to that of the first setting.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

BATCH = {"convolutions": 256, "transformer": 16}  # the global batch size of each model
_MIB = 2**20
_INTERVAL = 0.002  # seconds between two samples of the resident set


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one process measures.

    Attributes:
        model: a key of `BATCH`.
        micro_batches: `micro_batches`.
        recompute: whether the blocks of the model are recomputed.
        xla: `runtime.xla`.
        batch: global batch size.
        shrink: divides the widths of the model.
    """

    model: str
    micro_batches: int = 1
    recompute: bool = False
    xla: str = "off"
    batch: int = 256
    shrink: int = 1


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measures the settings and prints a table; returns its rows."""
    flags = _parse(arguments)
    rows = []
    for model in flags.models:
        batch = flags.batch or BATCH[model]
        recompute = [False] if model == "convolutions" else [False, True]
        settings = [
            Setting(model, count, again, flags.xla, batch, flags.shrink)
            for count in flags.micro_batches
            for again in recompute
        ]
        rows += measure(settings, steps=flags.steps, rounds=flags.rounds)
    print(table(rows))
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(rows, indent=1))
    return rows


def measure(settings: list[Setting], *, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Measures settings of one model, each in its own process.

    Args:
        settings: what to measure; the first one is what the others are compared with.
        steps: steps of each process per round.
        rounds: how often each process trains, alternately with the others.

    Returns:
        One row per setting: its fields, baseline_mib, peak_mib (above the baseline), seconds (per
        step, the median), and the ratios peak_ratio and time_ratio to the first setting.
    """
    # The peaks first, one process after the other; the processes that are timed exist together.
    workers, rows = [], []
    try:
        for setting in settings:
            worker = Worker(setting)
            workers.append(worker)
            rows.append({**dataclasses.asdict(setting), **worker.train(1)})
        times: list[list[float]] = [[] for _ in settings]
        for _ in range(rounds):
            for each, worker in zip(times, workers, strict=True):
                each.append(worker.train(steps)["seconds"])
        # Last, because it traces the step, too.
        for row, worker in zip(rows, workers, strict=True):
            row |= worker.estimate()
    finally:
        for worker in workers:
            worker.stop()
    for row, each in zip(rows, times, strict=True):
        row["seconds"] = statistics.median(each) if each else row["seconds"]
        ratios = [a / b for a, b in zip(each, times[0], strict=True)]
        row["time_ratio"] = statistics.median(ratios) if ratios else None
        row["peak_ratio"] = rows[0]["peak_mib"] / max(row["peak_mib"], 1)
    return rows


class Worker:
    """A process that trains one setting on request."""

    def __init__(self, setting: Setting):
        """Starts the process."""
        command = [sys.executable, "-m", "benchmarks.memory", "--worker"]
        self._process = subprocess.Popen(
            [*command, json.dumps(dataclasses.asdict(setting))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def train(self, steps: int) -> dict[str, Any]:
        """Trains some steps; returns baseline_mib, peak_mib and seconds (per step)."""
        return self._request(steps)

    def estimate(self) -> dict[str, Any]:
        """Returns estimate_mib: the estimated peak of a step, without the variables."""
        return self._request(0)

    def _request(self, steps: int) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        print(steps, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"A process of the benchmark ended with code {self._process.wait()}.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Ends the process."""
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a Markdown table of the rows of `measure`."""
    lines = [
        "| model | micro-batches | recompute | xla | peak MiB | estimate MiB | times less "
        "| s per step | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "" if row["time_ratio"] is None else f"{row['time_ratio']:.2f}"
        lines.append(
            f"| {row['model']} | {row['micro_batches']} | {'yes' if row['recompute'] else 'no'} "
            f"| {row['xla']} | {row['peak_mib']:,.0f} | {row['estimate_mib']:,.0f} "
            f"| {row['peak_ratio']:.2f} "
            f"| {row['seconds']:.2f} | {ratio} |"
        )
    return "\n".join(lines)


def _work(setting: Setting) -> None:
    """Trains as often as a line of stdin requests, or estimates; answers with a line of JSON each."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Keeps the output of frameworks out of the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import tensorflow as tf

    from ctl.built import memory_estimate

    trainer = _trainer(setting)
    memory = _Memory()
    for line in sys.stdin:
        if not int(line):
            needed = memory_estimate.estimate(trainer)
            size = needed.peak - needed.persistent
            print(json.dumps({"estimate_mib": size / _MIB}), file=answers, flush=True)
            continue
        start = time.perf_counter()
        trainer.train(tf.constant(int(line)))
        seconds = (time.perf_counter() - start) / int(line)
        answer = {
            "baseline_mib": memory.baseline / _MIB,
            "peak_mib": (memory.peak() - memory.baseline) / _MIB,
            "seconds": seconds,
        }
        print(json.dumps(answer), file=answers, flush=True)


class _Memory:
    """The memory now, and its peak from now on, of a GPU or of this process."""

    def __init__(self) -> None:
        import tensorflow as tf

        self._gpu = bool(tf.config.list_physical_devices("GPU"))
        self.baseline = self._now()
        self._peak = self.baseline
        if self._gpu:
            tf.config.experimental.reset_memory_stats("GPU:0")
        else:
            threading.Thread(target=self._sample, daemon=True).start()

    def peak(self) -> float:
        """The peak so far, in bytes."""
        if self._gpu:
            import tensorflow as tf

            return float(tf.config.experimental.get_memory_info("GPU:0")["peak"])
        # VmHWM alone would also contain what building the model needed for a moment.
        return max(self._peak, self._now())

    def _now(self) -> float:
        if self._gpu:
            import tensorflow as tf

            return float(tf.config.experimental.get_memory_info("GPU:0")["current"])
        status = pathlib.Path("/proc/self/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, self._now())
            time.sleep(_INTERVAL)


def _trainer(setting: Setting) -> Any:
    import tensorflow as tf
    import tf_keras

    from benchmarks import memory_models
    import ctl
    from ctl.built.inner_loop import loop_of

    tf.get_logger().setLevel("ERROR")
    gpu = bool(tf.config.list_physical_devices("GPU"))
    tf_keras.utils.set_random_seed(1)
    trainer = memory_models.TRAINERS[setting.model](
        shrink=setting.shrink,
        recompute=setting.recompute,
        global_batch_size=setting.batch,
        optimizer=lambda: tf_keras.optimizers.SGD(1e-3, momentum=0.9),
        strategy=tf.distribute.OneDeviceStrategy("gpu:0" if gpu else "cpu:0"),
        options=ctl.TrainerOptions(
            micro_batches=setting.micro_batches, xla=setting.xla, prefetch=1
        ),
    )
    # The first batch is read once, so that the step alone is measured.
    next(iter(loop_of(trainer).pipeline.training_dataset(setting.batch, start=0)))
    return trainer


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=BATCH, default=list(BATCH))
    parser.add_argument("--micro_batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--batch", type=int, default=0, help="global batch size")
    parser.add_argument("--xla", default="off", choices=("off", "step", "loop", "gradients"))
    parser.add_argument("--shrink", type=int, default=1, help="divides the widths of the models")
    parser.add_argument("--steps", type=int, default=1, help="steps per round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are timed")
    parser.add_argument("--quick", action="store_true", help="small models, in a minute")
    parser.add_argument("--json", help="file to write the rows to")
    flags = parser.parse_args(arguments)
    if flags.quick:
        flags.shrink, flags.micro_batches, flags.rounds = 4, [1, 4], 1
    return flags


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(Setting(**json.loads(sys.argv[2])))
    else:
        main()
