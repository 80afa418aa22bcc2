"""What `ctl.testing.assert_loop_equivalent` reports about public tutorials and about Keras' `fit`.

    python -m benchmarks.comparisons.tutorials

The steps are written after these sources, with a smaller model; each is run with both versions of Keras:

    tensorflow/docs, site/en/tutorials/distribute/custom_training.ipynb (as of 2023)
    tensorflow/docs, site/en/tutorials/distribute/multi_worker_with_ctl.ipynb (f140399)
    orbit/examples/single_task/single_task_trainer.py of tf-models-official 2.20.0, as installed
"""

from collections.abc import Callable, Iterator
import os
import re
import sys
from types import ModuleType
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from orbit.examples.single_task import single_task_trainer
import tensorflow as tf
import tf_keras

from ctl import testing

FEATURES, CLASSES = 4, 3


def examples() -> tuple[np.ndarray, np.ndarray]:
    """24 examples that differ from each other."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(24, FEATURES)), rng.integers(0, CLASSES, 24)


def make_model(version: ModuleType) -> Any:
    """Two dense layers, in one version of Keras."""
    layers = version.layers
    return version.Sequential(
        [layers.Input([FEATURES]), layers.Dense(5, activation="tanh"), layers.Dense(CLASSES)]
    )


def tutorial(version: ModuleType, make_optimizer: Callable[[], Any], *, names_batch: bool) -> Any:
    """The step of both tutorials: an average over the global batch, summed by apply_gradients.

    The multi-worker tutorial, and the custom training tutorial until 2022, give `compute_average_loss`
    the size of the global batch. Without it, the function takes the rows of this replica times the
    number of replicas.
    """

    def build(strategy: tf.distribute.Strategy, global_batch_size: int) -> testing.Loop:
        losses, options = version.losses, {"from_logits": True, "reduction": "none"}
        with strategy.scope():
            model, optimizer = make_model(version), make_optimizer()
            accuracy = version.metrics.SparseCategoricalAccuracy(name="train_accuracy")
            loss_object = losses.SparseCategoricalCrossentropy(**options)

        def replica_step(inputs: Any) -> tf.Tensor:
            features, labels = inputs
            with tf.GradientTape() as tape:
                predictions = model(features, training=True)
                per_example = loss_object(labels, predictions)
                size = global_batch_size if names_batch else None
                loss = tf.nn.compute_average_loss(per_example, global_batch_size=size)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(labels, predictions)
            return loss

        @tf.function
        def distributed_step(inputs: Any) -> tf.Tensor:
            losses = strategy.run(replica_step, args=(inputs,))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

        return testing.Loop(distributed_step, [model, optimizer, accuracy])

    return build


def orbit_example(strategy: tf.distribute.Strategy, global_batch_size: int) -> Any:
    """Orbit's own example trainer."""
    with strategy.scope():
        inputs = tf_keras.Input([FEATURES], name="x")
        outputs = make_model(tf_keras)(inputs)
        model = tf_keras.Model({"x": inputs}, outputs)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        accuracy = tf_keras.metrics.SparseCategoricalAccuracy("accuracy")
        return single_task_trainer.SingleTaskTrainer(
            None, "label", model, loss, tf_keras.optimizers.Adam(), metrics=accuracy
        )


def fit(version: ModuleType) -> Any:
    """A compiled model with a mean loss, which is the default."""

    def build(strategy: tf.distribute.Strategy, global_batch_size: int) -> Any:
        with strategy.scope():
            model = make_model(version)
            loss = version.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(version.optimizers.Adam(), loss, metrics=["accuracy"])
        return model

    return build


def programs() -> dict[str, tuple[Any, Any]]:
    """Name -> what builds the loop, and its examples."""
    x, label = examples()
    programs = {}
    for name, version in (("Keras 2", tf_keras), ("Keras 3", keras)):
        adam, rmsprop = version.optimizers.Adam, version.optimizers.RMSprop
        build = tutorial(version, adam, names_batch=False)
        programs[f"custom training tutorial, {name}"] = build, (x, label)
        build = tutorial(version, rmsprop, names_batch=True)
        programs[f"multi-worker custom loop, {name}"] = build, (x, label)
        programs[f"`fit`, {name}"] = fit(version), (x, label)
    programs["Orbit's example trainer"] = orbit_example, {"x": x, "label": label}
    return programs


def rows(names: list[str]) -> Iterator[str]:
    """Yields one row of the table per program.

    Args:
        names: parts of the names of programs; all if empty.
    """
    for name, (build, batches) in programs().items():
        if names and not any(part in name for part in names):
            continue
        report = testing.check_loop_equivalence(build, batches, in_process=True)
        cells = []
        for counts in ([4, 4], [3, 2], [2, 2, 2, 2], [2, 2, 1, 0]):
            differences = [d for d in report.differences if d.split.row_counts == counts]
            updates = [d.distance for d in differences if d.kind == "update"]
            errors = [e for split, e in report.errors.items() if split.row_counts == counts]
            kinds = ", ".join(dict.fromkeys(d.kind for d in differences))
            same = f"{kinds} differs" if differences else "the same"
            cells.append("error" if errors else f"{max(updates):.1e}" if updates else same)
        cause = re.split("[:,]", report.headline[1])[0] if report.verdict != "equivalent" else ""
        yield " | ".join([f"| {name}", report.verdict, *cells, f"{cause} |"])


def main() -> None:
    """Prints the table of docs/prove-your-loop.md."""
    tf.get_logger().setLevel("ERROR")
    testing.split_cpu(4)
    versions = f"tensorflow {tf.__version__}, tf_keras {tf_keras.__version__}"
    print(f"{versions}, keras {keras.__version__}\n")
    print("| program | verdict | 4 + 4 rows | 3 + 2 | 2 + 2 + 2 + 2 | 2 + 2 + 1 + 0 | cause |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(sys.argv[1:]):
        print(row, flush=True)


if __name__ == "__main__":
    main()
