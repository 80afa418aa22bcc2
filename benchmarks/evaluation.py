"""Compares the speed of evaluations with that of hand-written loops.

    python -m benchmarks.evaluation

The model is the network of `experiments/mnist.py`. A large evaluation has 10,000 images, a small one
1,000, in batches of 250. Each program evaluates the complete data again and
again. Its processes take turns as in `benchmarks.loops`. The reference computes the forward pass alone:
no loss and no metrics. ctl's evaluation computes the loss and the accuracy; with collected outputs, the
host also receives the outputs of all examples.
"""

from collections.abc import Callable
import functools
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import flags as command_line
from benchmarks import models, report, windows
import ctl

BATCH = 250
MODEL = models.MODELS["mnist256"]
CTL, COLLECTED = "ctl", "ctl, collected outputs"
FORWARD, METRICS = "hand-written, forward pass", "hand-written, loss and accuracy"
KERAS = "tf_keras evaluate"


def main(arguments: list[str] | None = None) -> None:
    """Measures all programs; prints the tables."""
    flags = command_line.parse(
        __doc__,
        arguments,
        rows=[10_000, 1_000],
        processes=3,
        windows=6,
        seconds=1.0,
        result=pathlib.Path,
    )
    command = [sys.executable, "-m", "benchmarks.evaluation", "--worker"]
    measured = []
    for rows in flags.rows:
        title = f"{rows:,} images, one replica"
        rates, _ = windows.measure(
            {
                name: functools.partial(windows.worker, [*command, name, str(rows)])
                for name in PREPARE
            },
            title=title,
            processes=flags.processes,
            windows=flags.windows,
            seconds=flags.seconds,
        )
        measured += report.make_rows(title, BATCH, rates, CTL)
    labels = {name: name for name in PREPARE}
    report.show(measured, CTL, labels, flags.result, packages=["tensorflow-cpu", "tf-keras"])


class Trainer(ctl.StandardTrainer):
    """The model and its data, of which evaluations read the first rows."""

    def __init__(self, rows: int, **arguments):
        self._rows = rows
        super().__init__(
            global_batch_size=BATCH, optimizer=lambda: MODEL.optimizer(tf_keras), **arguments
        )

    def build_model(self):
        return MODEL.build(tf_keras)

    def build_dataset(self, split, input_context):
        x, y = images(self._rows)
        return ctl.data.arrays({"x": x, "label": y})

    def per_example_loss(self, batch, outputs):
        return MODEL.loss_fn(tf_keras)(batch["label"], outputs)

    def build_metrics(self):
        return MODEL.metrics(tf_keras)


class CollectingTrainer(Trainer):
    """Collects the outputs of all examples."""

    def collect_outputs(self, batch, outputs):
        return {"outputs": outputs}


def images(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images as float32, [rows, 28, 28], and their labels."""
    x, y = MODEL.floats()
    return x[:rows], y[:rows]


def run(name: str, rows: int, tick: windows.Windows) -> None:
    """Evaluates until `tick` raises."""
    evaluate = PREPARE[name](rows)
    while True:
        evaluate()
        tick(rows // BATCH)


def prepare_ctl(trainer: type[Trainer], rows: int) -> Callable:
    evaluator = ctl.StandardEvaluator(trainer(rows))
    return lambda: evaluator.evaluate(tf.constant(-1))


def prepare_loop(rows: int, *, metrics: bool) -> Callable:
    network = MODEL.build(tf_keras)
    mean, accuracy = tf_keras.metrics.Mean(), MODEL.metrics(tf_keras)["accuracy"]
    loss_fn = MODEL.loss_fn(tf_keras)

    @tf.function
    def step(x, y):
        outputs = network(x, training=False)
        if metrics:
            mean.update_state(loss_fn(y, outputs))
            accuracy.update_state(y, outputs)
        return tf.reduce_sum(outputs)

    data = pipeline(rows)

    def evaluate() -> None:
        mean.reset_state()
        accuracy.reset_state()
        for x, y in data:
            last = step(x, y)
        last.numpy()
        if metrics:
            mean.result().numpy()
            accuracy.result().numpy()

    return evaluate


def prepare_keras(rows: int) -> Callable:
    network = MODEL.build(tf_keras)
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(loss=loss, metrics=[MODEL.metrics(tf_keras)["accuracy"]])
    data = pipeline(rows)
    return lambda: network.evaluate(data, verbose=0)


def pipeline(rows: int) -> tf.data.Dataset:
    """The pipeline of the tutorials."""
    return tf.data.Dataset.from_tensor_slices(images(rows)).batch(BATCH).prefetch(tf.data.AUTOTUNE)


PREPARE = {
    CTL: functools.partial(prepare_ctl, Trainer),
    COLLECTED: functools.partial(prepare_ctl, CollectingTrainer),
    FORWARD: functools.partial(prepare_loop, metrics=False),
    METRICS: functools.partial(prepare_loop, metrics=True),
    KERAS: prepare_keras,
}


def work(name: str, rows: str) -> None:
    """Evaluates in the windows that another process requests."""
    tf.get_logger().setLevel("ERROR")
    windows.serve(lambda tick: run(name, int(rows), tick))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        main()
