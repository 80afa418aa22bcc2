"""Tokens per second and model-flops utilization of the gallery's Transformer."""

import statistics
import time

import tensorflow as tf
import tf_keras

from benchmarks.gpu import devices, kernels
from benchmarks.gpu.parts import Report
import ctl
from ctl.built.flops import count_flops, peak_flops
from experiments.trainers.char_lm import CharLmTrainer

# The size of GPT-2 (Radford et al. 2019), small, with bytes as tokens.
_SIZE = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "recompute": ""}
_SMALL = {"layers": 2, "heads": 2, "width": 16, "context": 32, "recompute": ""}


def measure(report: Report) -> None:
    """bfloat16 with several batch sizes, up to the first that does not fit; then float16."""
    sizes = [("bfloat16", 32), ("bfloat16", 64), ("float16", 32)]
    for precision, batch in [("bfloat16", 2)] if report.small else sizes:
        with report.attempt(f"{precision}, batch {batch}"):
            _measure(report, precision, batch)


def _measure(report: Report, precision: str, batch: int) -> None:
    size, steps, windows = (_SMALL, 2, 1) if report.small else (_SIZE, 10, 4)
    xla = "loop" if devices.GPU else "off"
    trainer = CharLmTrainer(
        strategy=devices.make_strategy(1),
        global_batch_size=batch,
        optimizer=lambda: tf_keras.optimizers.AdamW(1e-4),
        options=ctl.TrainerOptions(precision=precision, xla=xla, data={"dir": ""}, model=size),
    )
    start = time.perf_counter()
    trainer.train(tf.constant(steps))
    first = time.perf_counter() - start
    seconds = []
    for _ in range(windows):
        start = time.perf_counter()
        trainer.train(tf.constant(steps))  # reads the loss at its end, and so waits for the steps
        seconds.append((time.perf_counter() - start) / steps)
    step = statistics.median(seconds)
    flops = count_flops(trainer)
    peak = peak_flops(f"{devices.KIND}:0", precision)
    report(
        f"{precision}, batch {batch}",
        tokens_per_second=round(batch * size["context"] / step),
        milliseconds_per_step=round(1e3 * step, 2),
        model_flops_per_step=flops,
        utilization=round(flops / step / peak, 4) if flops and peak else None,
        first_loop_seconds=round(first, 1),
        peak_gib=round(tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**30, 1)
        if devices.GPU
        else None,
        xla=xla,
    )
    name = f"{precision}, batch {batch}, kernels"
    with report.attempt(name):
        report(name, **kernels.measure(lambda: trainer.train(tf.constant(steps)), steps))
