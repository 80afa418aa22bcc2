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
        columns = [
            ("rows per replica", 0),
            ("`optimizer.shard_state`", None),
            ("packs", None),
            *((t, 0) for t in titles),
        ]
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
    import numpy as np
    import tensorflow as tf
    import tf_keras

    import ctl
    from ctl.built.memory_estimate import estimate
    from ctl.hardware import engines, selection
    from ctl.hardware.strategies import StrategyOptions

    class Trainer(ctl.StandardTrainer):
        def build_model(self) -> Any:
            dense = tf_keras.layers.Dense
            layers = [dense(width, activation="relu", use_bias=False) for _ in range(depth)]
            return tf_keras.Sequential([tf_keras.Input([width]), *layers, dense(10)])

        def build_dataset(self, split: str, input_context: Any) -> Any:
            draw = np.random.default_rng(0)
            x = draw.normal(size=(4 * rows, width)).astype(np.float32)
            return ctl.data.arrays({"x": x, "label": draw.integers(0, 10, 4 * rows)})

        def per_example_loss(self, batch: Any, outputs: Any) -> Any:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], outputs)

    options = StrategyOptions(cluster=engines.from_environment(os.environ))
    strategy = selection.build("multi_worker_mirrored", options).strategy
    strategy.extended._communication_options.bytes_per_pack = round(pack * _MIB)
    start = _status("VmRSS")
    trainer = Trainer(
        strategy=strategy,
        global_batch_size=2 * rows,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-4),
        options=ctl.TrainerOptions(
            clip=ctl.Clip(global_norm=1.0),
            shard_state={"False": False, "True": True}.get(mode, mode),  # type: ignore[arg-type]
        ),
    )
    trainer.train(tf.constant(1))
    gc.collect()
    held = _status("VmRSS") - start
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    begin = time.perf_counter()
    trainer.train(tf.constant(2))
    milliseconds = (time.perf_counter() - begin) * 500
    peak = _status("VmHWM") - start
    return dict(held=held, peak=peak, estimate=estimate(trainer).peak / _MIB, ms=milliseconds)


def _status(key: str) -> float:
    """Returns a size of this process in MiB."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
