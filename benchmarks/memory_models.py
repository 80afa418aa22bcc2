"""The models that `benchmarks.memory` measures."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks.models import Model
import ctl

_LAYERS = tf_keras.layers


@dataclasses.dataclass(frozen=True)
class Sized(Model):
    """A model on one global batch of random examples.

    Attributes:
        shrink: divides the widths of the model.
        recompute: whether the blocks are recomputed.
    """

    has_accuracy: bool = False
    shrink: int = 1
    recompute: bool = False


class Convolutions(Sized):
    """Eight convolutions of 64 channels on images of 64 x 64 x 3."""

    def build(self, keras, dropout=0.0):
        channels = 64 // self.shrink
        layers = [_LAYERS.Conv2D(channels, 3, padding="same", activation="relu") for _ in range(8)]
        ends = [_LAYERS.GlobalAveragePooling2D(), _LAYERS.Dense(10)]
        return tf_keras.Sequential([_LAYERS.Input((64, 64, 3)), *layers, *ends])

    def arrays(self):
        rng = np.random.default_rng(0)
        images = rng.normal(size=[self.batch, 64, 64, 3]).astype(np.float32)
        return images, rng.integers(10, size=self.batch)


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


class Transformer(Sized):
    """Twelve blocks of width 256 on sequences of 256 tokens, between an embedding and a classifier."""

    def build(self, keras, dropout=0.0):
        width = 256 // self.shrink
        x = tokens = _LAYERS.Input((256,), dtype="int32")
        x = _LAYERS.Embedding(64, width)(x)
        for _ in range(12):
            block = Block(width)
            x = (ctl.recompute(block) if self.recompute else block)(x)
        return tf_keras.Model(tokens, _LAYERS.Dense(64)(x))

    def arrays(self):
        tokens = np.random.default_rng(0).integers(64, size=[self.batch, 256]).astype(np.int32)
        return tokens, tokens


MODELS = {"convolutions": Convolutions, "transformer": Transformer}
