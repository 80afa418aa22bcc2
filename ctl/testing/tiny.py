"""A small trainer, for tests of everything except the model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.data.memory import arrays
from ctl.data.source import Nest
from ctl.trainer import StandardTrainer

FEATURES, CLASSES = 4, 3


def examples(count: int = 24) -> dict[str, np.ndarray]:
    """Makes distinct examples of three classes that a linear model can separate.

    Args:
        count: number of examples.

    Returns:
        `x`, [count, 4] float64, and `label`, [count] int64.
    """
    rng = np.random.default_rng(0)
    label = rng.integers(0, CLASSES, count)
    centers = np.eye(CLASSES, FEATURES)[label]
    return {"x": centers + 0.3 * rng.normal(size=(count, FEATURES)), "label": label}


class TinyTrainer(StandardTrainer):
    """A classifier with two dense layers.

    trainer = TinyTrainer(global_batch_size=8, optimizer=tf_keras.optimizers.SGD(0.1))
    trainer.train(tf.constant(10))
    """

    def build_model(self) -> tf_keras.Model:
        """Makes two dense layers."""
        hidden = tf_keras.layers.Dense(5, activation="tanh", input_shape=(FEATURES,))
        return tf_keras.Sequential([hidden, tf_keras.layers.Dense(CLASSES)])

    def build_dataset(self, split: str, input_context: Any) -> Any:
        """Returns the same examples for training and evaluation."""
        return arrays(examples())

    def per_example_loss(self, batch: Nest, outputs: Nest) -> tf.Tensor:
        """Returns the cross entropy of each row."""
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_metrics(self) -> dict[str, tf_keras.metrics.Metric]:
        """Returns the accuracy."""
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}


def tiny_trainer(
    strategy: tf.distribute.Strategy | None = None,
    *,
    global_batch_size: int = 8,
    optimizer: Callable[[], Any] | None = None,
    **options: Any,
) -> TinyTrainer:
    """Makes a `TinyTrainer`.

        trainer = tiny_trainer(strategy, precision="float64")

    Args:
        strategy: the strategy; the current one by default.
        global_batch_size: rows of a global batch.
        optimizer: makes the optimizer; plain SGD by default.
        **options: fields of `ctl.TrainerOptions`.
    """
    return TinyTrainer(
        strategy=strategy,
        global_batch_size=global_batch_size,
        optimizer=optimizer or (lambda: tf_keras.optimizers.SGD(0.1)),
        options=TrainerOptions(**options),
    )
