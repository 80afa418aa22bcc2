"""Random layers keyed by (seed, layer, step, row of the global batch).

tf_keras draws a dropout mask from a stateful generator, one on each replica: the mask depends on how
the batch is split and on how often the process was restarted. Here the numbers of row r at step k are
the Philox4x32-10 block function (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") of a
key made from (seed, layer) and the counter (r x blocks per row, k). Every replica that computes row r
draws the same numbers, and there is no state to save. docs/step.md, section 10, defines the bits.
"""

from collections.abc import Sequence
import hashlib
import math
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.replica.row_mask import current

_PHILOX = 1  # tf.random.Algorithm.PHILOX, as a number for raw ops
# A Philox block is four 32-bit numbers. Each row takes complete blocks, so that the counter of a row
# depends on its position alone.
_BLOCK = 4


def key_random_layers(
    model: tf_keras.layers.Layer, seed: int, *, scope: str = "model"
) -> list[str]:
    """Makes every random layer of a model draw by (seed, layer, step, row) in training steps.

    This covers the layers that draw one number per example or element through tf_keras'
    `RandomGenerator`: Dropout and its variants, GaussianNoise, recurrent and attention dropout.

    Args:
        model: a built or unbuilt model; it is changed in place, except for its weights.
        seed: the seed of the run.
        scope: the name of the model, which distinguishes the layers of several models.

    Returns:
        The names of the layers that were changed.
    """
    names = []
    # The position and not the name of a layer: tf_keras counts names up within a process, so a model
    # that is built a second time has other names.
    for index, layer in enumerate(model._flatten_layers()):
        generator = getattr(layer, "_random_generator", None)
        if generator is not None:
            layer._random_generator = RowKeyedGenerator(
                generator, seed=seed, layer=f"{scope}/{index}", name=layer.name
            )
            names.append(layer.name)
    return names


class RowKeyedGenerator:
    """Replaces the `RandomGenerator` of one layer.

    Outside of a training step it delegates to the generator that it replaced.
    """

    def __init__(self, replaced: Any, *, seed: int, layer: str, name: str):
        """Keys one layer.

        Args:
            replaced: the tf_keras `RandomGenerator` to replace.
            seed: the seed of the run.
            layer: the name of the model and the position of the layer in it.
            name: the name of the layer, for messages.
        """
        # A model that is keyed again keeps a single wrapper.
        self._replaced: Any = (
            replaced._replaced if isinstance(replaced, RowKeyedGenerator) else replaced
        )
        self._identity = (seed, layer, self._replaced._seed)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._replaced, attribute)

    def dropout(self, inputs: tf.Tensor, rate: float, noise_shape: Any = None) -> tf.Tensor:
        """Drops elements of `inputs` as `tf.nn.dropout` does, by the numbers of their rows."""
        if current() is None:
            return self._replaced.dropout(inputs, rate, noise_shape=noise_shape)
        # A noise shape that starts with 1 has one mask for all rows: that of row 0, on every replica.
        shared = noise_shape is not None and _static_first(noise_shape) == 1

        def sample(shape: Any, dtype: tf.DType, **_: Any) -> tf.Tensor:
            return tf.cast(self._uniform(shape, shared), dtype)

        return tf.nn.experimental.general_dropout(
            inputs, rate=rate, noise_shape=noise_shape, uniform_sampler=sample
        )

    def random_uniform(
        self,
        shape: Any,
        minval: float = 0.0,
        maxval: float | None = None,
        dtype: Any = None,
        nonce: int | None = None,
    ) -> tf.Tensor:
        """Draws uniform numbers in [minval, maxval); axis 0 of `shape` is this replica's rows."""
        if current() is None:
            return self._replaced.random_uniform(shape, minval, maxval, dtype, nonce)
        dtype = tf.as_dtype(dtype or tf_keras.backend.floatx())
        if not dtype.is_floating:
            raise self._rejection(f"draws {dtype.name} numbers")
        numbers = tf.cast(self._uniform(shape), dtype)
        return numbers * ((1.0 if maxval is None else maxval) - minval) + minval

    def random_normal(
        self,
        shape: Any,
        mean: float = 0.0,
        stddev: float = 1.0,
        dtype: Any = None,
        nonce: int | None = None,
    ) -> tf.Tensor:
        """Draws normal numbers; axis 0 of `shape` is this replica's rows."""
        if current() is None:
            return self._replaced.random_normal(shape, mean, stddev, dtype, nonce)
        numbers = _to_normal(self._bits(shape), shape)
        return tf.cast(numbers, dtype or tf_keras.backend.floatx()) * stddev + mean

    def truncated_normal(self, shape: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        """Raises a UsageError in a step: rejection sampling uses a varying number of draws per row."""
        if current() is None:
            return self._replaced.truncated_normal(shape, *args, **kwargs)
        raise self._rejection("draws from a truncated normal distribution")

    def make_seed_for_stateless_op(self) -> tf.Tensor:
        """Raises a UsageError in a step: the layer would draw for its local batch, not per row."""
        if current() is None:
            return self._replaced.make_seed_for_stateless_op()
        raise self._rejection("draws for its complete local batch")

    def make_legacy_seed(self) -> int | None:
        """Raises a UsageError in a step, like `make_seed_for_stateless_op`."""
        if current() is None:
            return self._replaced.make_legacy_seed()
        raise self._rejection("draws for its complete local batch")

    def _rejection(self, problem: str) -> UsageError:
        return UsageError(
            f"Layer {self._name} {problem}, which cannot be keyed by the rows of the global batch: do "
            "it in the input pipeline, or use a layer that draws one number per element."
        )

    def _uniform(self, shape: Any, shared: bool = False) -> tf.Tensor:
        """Draws float32 numbers in [0, 1); with `shared`, the same for all rows of the batch."""
        bits = self._bits(shape, shared)
        return tf.reshape(_to_unit(bits)[:, : _row_size(shape)[0]], shape)

    def _bits(self, shape: Any, shared: bool = False) -> tf.Tensor:
        """Draws [rows, blocks per row x 4] uint32, complete Philox blocks for each row."""
        rows = current()
        assert rows is not None  # every caller has checked it
        # Counted while the step is traced: a layer that is called twice in a step draws other numbers.
        call = rows.calls.get(self._identity[1], 0)
        rows.calls[self._identity[1]] = call + 1
        blocks = _row_size(shape)[1]
        first = tf.cast(0 if shared else rows.first_row, tf.uint64)
        # Bits and not floats, because XLA converts the same bits to other floats than TensorFlow's
        # kernels. The raw op and not the public one, because only it accepts key and counter: one call
        # draws the blocks of consecutive counters, which are those of consecutive rows.
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=tf.stack([shape[0], blocks * _BLOCK]),
            key=tf.constant([_key(*self._identity, call)], tf.uint64),
            counter=tf.stack([first * tf.cast(blocks, tf.uint64), tf.cast(rows.step, tf.uint64)]),
            alg=_PHILOX,
            dtype=tf.uint32,
        )


def _to_unit(bits: tf.Tensor) -> tf.Tensor:
    """Converts uint32 to float32 in [0, 1)."""
    # 23 bits become the fraction of a number in [1, 2); subtracting 1 is exact.
    one = tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(bits, 0x7FFFFF), 0x3F800000)
    return tf.bitcast(one, tf.float32) - 1.0


def _to_normal(bits: tf.Tensor, shape: Any) -> tf.Tensor:
    """Converts pairs of uniform numbers to pairs of normal numbers (Box and Muller 1958)."""
    pairs = tf.reshape(_to_unit(bits), tf.concat([tf.shape(bits)[:1], [-1, 2]], axis=0))
    # 1 - u is in (0, 1], so that its logarithm is finite.
    radius = tf.sqrt(-2.0 * tf.math.log(1.0 - pairs[..., 0]))
    angle = 2.0 * math.pi * pairs[..., 1]
    normal = tf.stack([radius * tf.cos(angle), radius * tf.sin(angle)], axis=-1)
    rows = tf.reshape(normal, tf.shape(bits))
    return tf.reshape(rows[:, : _row_size(shape)[0]], shape)


def _static_first(shape: Any) -> int | None:
    """Returns the first number of a shape; None if it is known only when the step runs."""
    static = tf.get_static_value(tf.convert_to_tensor(shape), partial=True)
    return None if static is None else static[0]


def _row_size(shape: Any) -> tuple[Any, Any]:
    """Returns how many numbers a row needs, and the number of Philox blocks that contain them."""
    inner: Sequence[Any] | tf.Tensor = shape[1:]
    static = tf.get_static_value(tf.convert_to_tensor(inner, tf.int32))
    if static is not None:
        size = math.prod(int(n) for n in static)
        return size, -(-size // _BLOCK)  # rounded up
    product = tf.reduce_prod(inner)
    return product, -(-product // _BLOCK)


def _key(seed: int, layer: str, layer_seed: int | None, call: int) -> int:
    # A cryptographic hash: layers with similar names get unrelated keys, in every process alike, which
    # Python's own hash of a string does not give.
    text = f"ctl {seed} {layer} {layer_seed} {call}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
