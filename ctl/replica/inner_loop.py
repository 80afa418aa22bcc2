"""Many whole steps as one XLA program: `runtime.xla=loop`."""

from collections.abc import Callable
import math
from typing import Any

import tensorflow as tf

# A chunk is held three times: in use, on its way, and being made.
CHUNK_BYTES = 256 * 2**20
MOST_STEPS = 512


class CompiledLoop:
    """Runs any number of steps over chunks of batches; an inner loop for Orbit.

        loop = CompiledLoop(step, strategy=strategy, size=100)
        loop(iter(chunks), tf.constant(250))        # two chunks and a half; the rest is kept

    A chunk is longer or shorter than an inner loop as memory allows; one program with the number of
    steps as an argument serves them all, so nothing is compiled again for the last steps.

    Attributes:
        size: steps in a chunk.
    """

    def __init__(self, step: Callable[[Any], None], *, strategy: tf.distribute.Strategy, size: int):
        """Compiles nothing yet.

        Args:
            step: one replica's whole step on one batch, counted.
            strategy: of one replica.
            size: steps in a chunk.
        """
        self._step = step
        self._strategy = strategy
        self.size = size
        self._chunk: Any = None
        self._used = size
        self._program = tf.function(self._steps, jit_compile=True)

    def __call__(self, iterator: Any, num_steps: tf.Tensor) -> None:
        """Runs `num_steps` steps.

        Args:
            iterator: of chunks, tensors of shape [size, ...].
            num_steps: how many steps.
        """
        left = int(num_steps)
        while left:
            if self._used == self.size:
                self._chunk, self._used = next(iterator), 0
            steps = min(left, self.size - self._used)
            arguments = (self._chunk, tf.constant(self._used), tf.constant(steps))
            self._strategy.run(self._program, args=arguments)
            self._used += steps
            left -= steps

    def forget(self) -> None:
        """Drops what is left of a chunk: the data begins elsewhere."""
        self._chunk, self._used = None, self.size

    def _steps(self, chunk: Any, start: tf.Tensor, steps: tf.Tensor) -> None:
        for i in tf.range(steps):
            self._step(tf.nest.map_structure(lambda values, i=i: values[start + i], chunk))


def chunk_size(spec: Any, rows: int) -> int:
    """Steps in a chunk: as many as fit, and not more than are worth it.

    Args:
        spec: of a batch, `tf.TensorSpec`s of [rows, ...].
        rows: rows of a batch.
    """
    row = sum(
        math.prod(n or 1 for n in s.shape[1:].as_list()) * s.dtype.size
        for s in tf.nest.flatten(spec)
    )
    return max(1, min(MOST_STEPS, CHUNK_BYTES // max(1, row * rows)))
