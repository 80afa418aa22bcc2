"""The models that are trained over a network. Small batches keep the time for computing short."""

import dataclasses

import numpy as np

from benchmarks.memory_models import Block
from benchmarks.models import Mnist, Model

_TOKENS, _FEATURES, _CLASSES = 16, 64, 512


@dataclasses.dataclass(frozen=True)
class Transformer(Model):
    """Blocks of width 256 on short sequences of vectors: 4.9 million parameters with six blocks.

    There is no embedding, because its gradient is sparse and is gathered instead of reduced.

    Attributes:
        blocks: the number of blocks.
        width: the number of units of each block.
    """

    blocks: int = 6
    width: int = 256

    def build(self, keras, dropout=0.0):
        x = vectors = keras.layers.Input((_TOKENS, _FEATURES))
        x = keras.layers.Dense(self.width)(x)
        for _ in range(self.blocks):
            x = Block(self.width)(x)
        return keras.Model(vectors, keras.layers.Dense(_CLASSES)(x))

    def arrays(self):
        draw = np.random.default_rng(0)
        vectors = draw.normal(size=[1024, _TOKENS, _FEATURES]).astype(np.float32)
        return vectors, draw.integers(_CLASSES, size=[1024, _TOKENS]).astype(np.int32)


# `batch` is that of one replica: the global batch grows with the number of workers.
MODELS = {
    "mnist": Mnist(batch=16, has_accuracy=False),
    "transformer": Transformer(batch=2, has_accuracy=False),
    "small": Transformer(batch=2, has_accuracy=False, blocks=1, width=32),  # for a test
}
