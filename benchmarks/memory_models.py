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


class Block(_LAYERS.Layer):
    """A block of a Transformer, with dropout."""

    def __init__(self, width: int):
        super().__init__()
        self._attention = _LAYERS.MultiHeadAttention(4, width // 4, dropout=0.1)
        self._wide = _LAYERS.Dense(4 * width, activation="gelu")
        self._narrow = _LAYERS.Dense(width)
        self._norms = [_LAYERS.LayerNormalization() for _ in range(2)]
        self._dropout = _LAYERS.Dropout(0.1)

    def call(self, x: tf.Tensor, training: Any = None) -> tf.Tensor:
        """Computes [rows, tokens, width] from a tensor of the same shape."""
        y = self._norms[0](x)
        y = self._attention(y, y, use_causal_mask=True, training=training)
        x += self._dropout(y, training=training)
        y = self._narrow(self._wide(self._norms[1](x)))
        return x + self._dropout(y, training=training)


class Transformer(ctl.StandardTrainer):
    """Twelve blocks of width 256 on sequences of 256 tokens."""

    _CLASSES = 64
    _TOKENS = 256

    def __init__(self, *, shrink: int, recompute: bool, **arguments: Any):
        self._width, self._recompute = 256 // shrink, recompute
        super().__init__(**arguments)

    def build_model(self) -> tf_keras.Model:
        """Builds the blocks between an embedding and a classifier of each token."""
        x = tokens = _LAYERS.Input((self._TOKENS,), dtype="int32")
        x = _LAYERS.Embedding(self._CLASSES, self._width)(x)
        for _ in range(12):
            block = Block(self._width)
            x = (ctl.recompute(block) if self._recompute else block)(x)
        return tf_keras.Model(tokens, _LAYERS.Dense(self._CLASSES)(x))

    def build_dataset(self, split: str, input_context: tf.distribute.InputContext) -> Any:
        """Returns random tokens, one global batch."""
        shape = [self.global_batch_size, self._TOKENS]
        tokens = np.random.default_rng(0).integers(self._CLASSES, size=shape).astype(np.int32)
        return tf.data.Dataset.from_tensor_slices({"x": tokens, "label": tokens})

    def per_example_loss(self, batch: Any, outputs: Any) -> tf.Tensor:
        """The mean cross-entropy of the tokens of each sequence."""
        losses = tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )
        return tf.reduce_mean(losses, axis=1)


TRAINERS = {"convolutions": Convolutions, "transformer": Transformer}
