"""Measures the peak memory of a step on two workers, by the packs of the reduction and `shard_state`.

    python -m benchmarks.replica_memory --modes False True --packs 32 none

The workers are processes of this machine. They train dense layers without biases by Adam with
`clip.global_norm`. A peak is that of the resident set while two steps run, above its size before the
model exists; the first step, which is traced, is before. The pack "none" sends all gradients at once.
"""

from collections.abc import Sequence
import gc
import os
import pathlib
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import flags as command_line
from benchmarks import results
from benchmarks.windows import memory_mib, reset_peak

_MIB, _EVERYTHING = 2**20, 2**20  # MiB
# glibc returns freed memory at once, and oneDNN keeps no copies of weights between steps.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "2",
}


def main(arguments: Sequence[str] | None = None) -> list[list[Any]]:
    """Measures and prints the rows of the table; returns them."""
    flags = command_line.parse(
        __doc__,
        arguments,
        modes=["False", "True", "gradients"],
        packs=[32.0, None],
        width=3072,
        depth=8,
        rows=4,  # of each worker's batch
        result=pathlib.Path,
    )
    from benchmarks import replica_memory  # a function of the main module cannot be sent
    from ctl import testing

    rows = []
    for mode in flags.modes:
        for pack in flags.packs:
            answers = testing.run_workers(
                replica_memory.work, mode, pack or _EVERYTHING, flags.width, flags.depth, flags.rows,
                timeout=600, environment=ENVIRONMENT,
            )  # fmt: skip
            worst = max(answers, key=lambda answer: answer["peak"])
            shown = "all at once" if pack is None else f"{pack:g} MiB"
            sizes = [round(worst[k]) for k in ("held", "peak", "estimate")]
            rows.append([flags.rows, f"`{mode}`", shown, *sizes])
            print(rows[-1], {k: round(v) for k, v in worst.items()}, flush=True)
    if flags.result:
        titles = ("in use between steps, MiB", "peak of a step, MiB", "estimated peak, MiB")
        columns = [("rows per replica", 0), ("`optimizer.shard_state`", None), ("packs", None)]
        columns += [(title, 0) for title in titles]
        results.save(
            flags.result,
            {"peaks": results.Table(columns, rows)},
            samples=f"two processes, {flags.depth} dense layers of {flags.width} units "
            f"({4 * flags.depth * flags.width**2 / _MIB:.0f} MiB of weights), Adam, clip.global_norm",
            packages=["tensorflow-cpu"],
        )
    return rows


def work(mode: str, pack: float, width: int, depth: int, rows: int) -> dict[str, float]:
    """Trains in one worker; returns MiB: held between steps, peak of a step, its estimate; and ms."""
    import tensorflow as tf
    import tf_keras

    from benchmarks import models, variants
    import ctl
    from ctl.built.memory_estimate import estimate
    from ctl.hardware import engines, selection
    from ctl.hardware.strategies import StrategyOptions

    options = StrategyOptions(cluster=engines.from_environment(os.environ))
    strategy = selection.build("multi_worker_mirrored", options).strategy
    strategy.extended._communication_options.bytes_per_pack = round(pack * _MIB)
    start = memory_mib("VmRSS")
    size = {"width": width, "depth": depth, "rows": 4 * rows}
    trainer = variants.Trainer(
        models.Dense(batch=2 * rows, has_accuracy=False, **size),
        strategy=strategy,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-4),
        options=ctl.TrainerOptions(
            clip=ctl.Clip(global_norm=1.0),
            shard_state={"False": False, "True": True}.get(mode, mode),  # type: ignore[arg-type]
        ),
    )
    trainer.train(tf.constant(1))
    gc.collect()
    held = memory_mib("VmRSS") - start
    reset_peak()
    begin = time.perf_counter()
    trainer.train(tf.constant(2))
    milliseconds = (time.perf_counter() - begin) * 500
    peak = memory_mib("VmHWM") - start
    return dict(held=held, peak=peak, estimate=estimate(trainer).peak / _MIB, ms=milliseconds)


if __name__ == "__main__":
    main()
