"""Measures the peak memory and the speed of a step, by micro-batches and recomputation.

    python -m benchmarks.memory --models convolutions --micro_batches 1 4 16

Every setting runs in a process of its own, on the CPU. The peak is that of the resident set, above the
baseline: the process with its model built and its data read, before the first step. So it includes
what tracing needs, which the estimate of `--mode=explain` in the next column does not. The processes of
a model train alternately, one at a time, so that other load on the machine affects all of them equally;
the time of a step is the median over rounds of its ratio to that of the first setting.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import flags as command_line
from benchmarks import results, windows

BATCH = {"convolutions": 256, "transformer": 16}  # the global batch size of each model


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one process measures.

    Attributes:
        model: a key of `BATCH`.
        micro_batches: `micro_batches`.
        recompute: whether the blocks of the model are recomputed.
        batch: global batch size.
        shrink: divides the widths of the model.
    """

    model: str
    micro_batches: int = 1
    recompute: bool = False
    batch: int = 256
    shrink: int = 1


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measures the settings and prints a table; returns its rows."""
    flags = command_line.parse(
        __doc__,
        arguments,
        choices={"models": BATCH},
        models=list(BATCH),
        micro_batches=[1, 4, 16],
        batch=0,
        shrink=1,
        rounds=3,
    )
    rows = []
    for model in flags.models:
        recompute = [False] if model == "convolutions" else [False, True]
        settings = [
            Setting(model, count, again, flags.batch or BATCH[model], flags.shrink)
            for count in flags.micro_batches
            for again in recompute
        ]
        rows += measure(settings, rounds=flags.rounds)
    digits = {"peak_mib": 0, "estimate_mib": 0, "seconds": 2, "time_ratio": 2}
    titles = [(name, None) for name in ("model", "batch", "micro_batches", "recompute")]
    titles += digits.items()
    cells = [[row[n] if n in digits else str(row[n]) for n, _ in titles] for row in rows]
    print(results.format_table({"columns": titles, "rows": cells}))
    return rows


def measure(settings: list[Setting], *, rounds: int) -> list[dict[str, Any]]:
    """Measures settings of one model, each in its own process.

    Args:
        settings: what to measure; the first one is what the others are compared with.
        rounds: how often each process trains, alternately with the others.

    Returns:
        One row per setting: its fields, peak_mib (above the baseline), estimate_mib, seconds (per
        step, the median), and the ratio time_ratio to the first setting.
    """
    command = [sys.executable, "-m", "benchmarks.memory", "--worker"]
    # The peaks first, one process after the other; the processes that are timed exist together.
    with contextlib.ExitStack() as stack:
        workers, rows = [], []
        for setting in settings:
            row = dataclasses.asdict(setting)
            workers.append(stack.enter_context(windows.worker([*command, json.dumps(row)])))
            rows.append({**row, **windows.request(str(setting), workers[-1], 1)})
        times: list[list[float]] = [[row["seconds"]] for row in rows]
        for _ in range(rounds):
            for each, row, worker in zip(times, rows, workers, strict=True):
                each.append(windows.request(str(row), worker, 1)["seconds"])
        # Last, because it traces the step, too.
        for row, worker in zip(rows, workers, strict=True):
            row |= windows.request(str(row), worker, 0)
    for row, each in zip(rows, times, strict=True):
        timed = slice(1 if rounds else 0, None)  # the first step is traced
        row["seconds"] = statistics.median(each[timed])
        ratios = [a / b for a, b in zip(each[timed], times[0][timed], strict=True)]
        row["time_ratio"] = statistics.median(ratios)
    return rows


def _work(setting: Setting) -> None:
    """Trains as often as a line of stdin requests, or estimates; answers with a line of JSON each."""
    with windows.answers_only() as answers:
        import tensorflow as tf

        from ctl.built import memory_estimate

        trainer = _trainer(setting)
        baseline = windows.memory_mib("VmRSS")
        windows.reset_peak()  # building the model may need more for a moment
        for line in sys.stdin:
            if not int(line):
                needed = memory_estimate.estimate(trainer)
                answer = {"estimate_mib": (needed.peak - needed.persistent) / 2**20}
            else:
                start = time.perf_counter()
                trainer.train(tf.constant(int(line)))
                seconds = time.perf_counter() - start
                answer = {"peak_mib": windows.memory_mib("VmHWM") - baseline, "seconds": seconds}
            print(json.dumps(answer), file=answers, flush=True)


def _trainer(setting: Setting) -> Any:
    import tensorflow as tf
    import tf_keras

    from benchmarks import memory_models, variants
    import ctl
    from ctl.built.inner_loop import loop_of

    tf.get_logger().setLevel("ERROR")
    tf_keras.utils.set_random_seed(1)
    model = memory_models.MODELS[setting.model](
        batch=setting.batch, shrink=setting.shrink, recompute=setting.recompute
    )
    trainer = variants.Trainer(
        model,
        optimizer=lambda: tf_keras.optimizers.SGD(1e-3, momentum=0.9),
        strategy=tf.distribute.OneDeviceStrategy("cpu:0"),
        options=ctl.TrainerOptions(micro_batches=setting.micro_batches, prefetch=1),
    )
    # The first batch is read once, so that the step alone is measured.
    next(iter(loop_of(trainer).pipeline.training_dataset(setting.batch, start=0)))
    return trainer


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(Setting(**json.loads(sys.argv[2])))
    else:
        main()
