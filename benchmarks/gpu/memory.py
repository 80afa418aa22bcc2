"""Peaks of TensorFlow's allocator, and the advice for a step that does not fit into memory."""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks.gpu import devices
from benchmarks.gpu.parts import Report
import ctl
from ctl.errors import UsageError

_MIB = 2**20
_WIDTH, _SMALL_WIDTH = 4096, 64


def measure(report: Report) -> None:
    """Accumulation and recomputation by `benchmarks.memory`, and `optimizer.shard_state`."""
    runs = {
        "transformer": ["--models", "transformer", "--micro_batches", "1", "4", "--batch", "64"],
        "convolutions": ["--models", "convolutions", "--micro_batches", "1", "16"],
    }
    if report.small:
        runs = {"convolutions": ["--models", "convolutions", "--micro_batches", "1", "2"]}
        runs["convolutions"] += ["--batch", "4", "--shrink", "16"]
    for name, arguments in runs.items():
        with report.attempt(name), tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "rows.json")
            command = [sys.executable, "-m", "benchmarks.memory", "--rounds", "1", "--json", file]
            subprocess.run([*command, *arguments], check=True, stdout=sys.stderr)
            with open(file) as rows:
                for row in json.load(rows):
                    keys = ("model", "micro_batches", "recompute", "batch", "seconds")
                    sizes = {k: round(row[k]) for k in ("peak_mib", "estimate_mib")}
                    report(name, **{k: row[k] for k in keys}, **sizes)
    devices.split(2)
    for shard in (False, True):
        with report.attempt(f"shard_state={shard}"):
            _measure_shard_state(report, shard=shard)


class _Wide(ctl.StandardTrainer):
    """Three square dense layers, of which the slots are most of the memory."""

    def build_model(self):
        width = self.options.model.width
        layers = [tf_keras.layers.Dense(width, activation="tanh") for _ in range(3)]
        return tf_keras.Sequential([tf_keras.layers.Input((width,)), *layers])

    def build_dataset(self, split, input_context):
        draw = np.random.default_rng(0)
        x = draw.normal(size=[64, self.options.model.width]).astype(np.float32)
        return ctl.data.arrays({"x": x, "label": x[:, ::-1].copy()})

    def per_example_loss(self, batch, outputs):
        return tf.reduce_mean(tf.square(batch["label"] - outputs), axis=-1)


def _measure_shard_state(report: Report, *, shard: bool) -> None:
    """The memory of the first of two replicas; both are logical devices of one GPU."""
    trainer = _Wide(
        strategy=devices.make_strategy(2),
        global_batch_size=16,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-4),
        options=ctl.TrainerOptions(
            shard_state=shard, model={"width": _SMALL_WIDTH if report.small else _WIDTH}
        ),
    )
    if devices.GPU:
        tf.config.experimental.reset_memory_stats("GPU:0")
    trainer.train(tf.constant(3))
    info = tf.config.experimental.get_memory_info("GPU:0") if devices.GPU else {}
    sizes = {f"{name}_mib": round(value / _MIB) for name, value in info.items()}
    report(f"shard_state={shard}", replicas=2, **sizes)


def check_advice(report: Report) -> None:
    """A step that is too large for the memory ends in one line that says what to change."""
    if not devices.GPU:
        report("out of memory", skipped="requires a GPU: a CPU has no limit of memory")
        return
    gpu = tf.config.list_physical_devices("GPU")[0]
    limit = tf.config.LogicalDeviceConfiguration(memory_limit=2048)
    tf.config.set_logical_device_configuration(gpu, [limit])
    from benchmarks import memory_models

    trainer = memory_models.TRAINERS["convolutions"](
        shrink=1,
        recompute=False,
        global_batch_size=1024,
        optimizer=lambda: tf_keras.optimizers.SGD(1e-3),
        strategy=devices.make_strategy(1),
        options=ctl.TrainerOptions(xla="off", prefetch=1),
    )
    try:
        trainer.train(tf.constant(1))
        report("out of memory", error="a step of 1,024 images fits into 2 GiB")
    except UsageError as error:
        report("out of memory", message=str(error))
