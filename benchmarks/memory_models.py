"""The trainers that `benchmarks.memory` measures."""

from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

_LAYERS = tf_keras.layers


class Convolutions(ctl.StandardTrainer):
    """Eight convolutions of 64 channels on images of 64 x 64 x 3."""

    def __init__(self, *, shrink: int, recompute: bool, **arguments: Any):
        self._channels = 64 // shrink
        super().__init__(**arguments)

    def build_model(self) -> tf_keras.Model:
        """Builds the convolutions and a classifier of their mean."""
        layers = [
            _LAYERS.Conv2D(self._channels, 3, padding="same", activation="relu") for _ in range(8)
        ]
        return tf_keras.Sequential(
            [
                _LAYERS.Input((64, 64, 3)),
                *layers,
                _LAYERS.GlobalAveragePooling2D(),
                _LAYERS.Dense(10),
            ]
        )

    def build_dataset(self, split: str, input_context: tf.distribute.InputContext) -> Any:
        """Returns random images and labels, one global batch."""
        rng = np.random.default_rng(0)
        shape = [self.global_batch_size, 64, 64, 3]
        images = rng.normal(size=shape).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices(
            {"x": images, "label": rng.integers(10, size=shape[0])}
        )

    def per_example_loss(self, batch: Any, outputs: Any) -> tf.Tensor:
        """The cross-entropy of each image."""
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )


TRAINERS = {"convolutions": Convolutions}
