"""A small trainer for tests of what is around a step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.data.source import arrays
from ctl.trainer import StandardTrainer

FEATURES, CLASSES = 4, 3


def examples(count: int = 24, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Examples of three classes that differ from each other and can be learnt.

    Args:
        count: how many.
        seed: of the draw.

    Returns:
        `x`, [count, 4] float64, and `label`, [count] int64.
    """
    draw = np.random.default_rng(seed)
    label = draw.integers(0, CLASSES, count)
    centres = np.eye(CLASSES, FEATURES)[label]
    return {"x": centres + 0.3 * draw.normal(size=(count, FEATURES)), "label": label}


class TinyTrainer(StandardTrainer):
    """Two dense layers.

    trainer = TinyTrainer(global_batch_size=8, optimizer=tf_keras.optimizers.SGD(0.1))
    trainer.train(tf.constant(10))
    """

    def build_model(self) -> tf_keras.Model:
        """Makes the two layers."""
        hidden = tf_keras.layers.Dense(5, activation="tanh", input_shape=(FEATURES,))
        return tf_keras.Sequential([hidden, tf_keras.layers.Dense(CLASSES)])

    def build_dataset(self, split: str, input_context: Any) -> Any:
        """The same examples to train and to evaluate."""
        return arrays(examples())

    def per_example_loss(self, batch: Any, outputs: Any) -> tf.Tensor:
        """Cross entropy."""
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_metrics(self) -> dict[str, tf_keras.metrics.Metric]:
        """Accuracy."""
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}


def tiny_trainer(
    strategy: tf.distribute.Strategy | None = None,
    *,
    global_batch_size: int = 8,
    optimizer: Callable[[], Any] | None = None,
    **options: Any,
) -> TinyTrainer:
    """Makes a small trainer, by default under plain SGD.

        trainer = tiny_trainer(strategy, precision="float64")

    Args:
        strategy: where; the current strategy if not given.
        global_batch_size: rows of a global batch.
        optimizer: makes the optimizer.
        **options: those of `ctl.TrainerOptions`.
    """
    return TinyTrainer(
        strategy=strategy,
        global_batch_size=global_batch_size,
        optimizer=optimizer or (lambda: tf_keras.optimizers.SGD(0.1)),
        options=TrainerOptions(**options),
    )
