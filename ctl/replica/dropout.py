"""Random layers keyed by (seed, layer, step, row of the global batch).

tf_keras draws a dropout mask from a stateful generator, one on each replica: the mask depends on how
the batch is split and on how often the process was restarted. Here the numbers of row r at step k are
the Philox4x32-10 block function (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
of a key made from (seed, layer) and the counter (r x blocks a row, k): whoever holds the row draws
the same numbers, and there is no state to save.
"""

from collections.abc import Sequence
import hashlib
import math
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.replica.row_mask import current

_PHILOX = 1  # tf.random.Algorithm.PHILOX, as the raw ops number it
_BLOCK = 4  # a Philox block is four 32-bit numbers, so a row is padded to a multiple of four


def key_random_layers(
    model: tf_keras.layers.Layer, seed: int, *, scope: str = "model"
) -> list[str]:
    """Makes every random layer of a model draw by (seed, layer, step, row), inside a training step.

    It covers the layers that draw through tf_keras' `RandomGenerator`, a number for each example or
    element: Dropout and its variants, GaussianNoise, recurrent and attention dropout.

    Args:
        model: a built or unbuilt model; it is changed in place. Its weights are not touched.
        seed: the run's seed.
        scope: tells the layers of several models apart.

    Returns:
        The names of the layers that were changed.
    """
    names = []
    for index, layer in enumerate(model._flatten_layers()):
        generator = getattr(layer, "_random_generator", None)
        if generator is not None:
            layer._random_generator = RowKeyedGenerator(
                generator, seed=seed, layer=f"{scope}/{index}", name=layer.name
            )
            names.append(layer.name)
    return names


class RowKeyedGenerator:
    """Stands in for the `RandomGenerator` of one layer.

    Outside of a training step it leaves the drawing to the generator that it replaced.
    """

    def __init__(self, replaced: Any, *, seed: int, layer: str, name: str):
        """Keys one layer.

        Args:
            replaced: the tf_keras `RandomGenerator` whose place this takes.
            seed: the run's seed.
            layer: the model and the layer's place in it.
            name: the layer's name, for messages.
        """
        self._replaced: Any = (
            replaced._replaced if isinstance(replaced, RowKeyedGenerator) else replaced
        )
        self._identity = (seed, layer, self._replaced._seed)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._replaced, attribute)

    def dropout(self, inputs: tf.Tensor, rate: float, noise_shape: Any = None) -> tf.Tensor:
        """Drops elements of `inputs`, as `tf.nn.dropout` does, by the rows' own numbers."""
        if current() is None:
            return self._replaced.dropout(inputs, rate, noise_shape=noise_shape)
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
        """Uniform numbers in [minval, maxval); axis 0 of `shape` is the rows of this replica."""
        if current() is None:
            return self._replaced.random_uniform(shape, minval, maxval, dtype, nonce)
        dtype = tf.as_dtype(dtype or tf_keras.backend.floatx())
        if not dtype.is_floating:
            raise self._refusal(f"draws {dtype.name} numbers")
        drawn = tf.cast(self._uniform(shape), dtype)
        return drawn * ((1.0 if maxval is None else maxval) - minval) + minval

    def random_normal(
        self,
        shape: Any,
        mean: float = 0.0,
        stddev: float = 1.0,
        dtype: Any = None,
        nonce: int | None = None,
    ) -> tf.Tensor:
        """Normal numbers; axis 0 of `shape` is the rows of this replica."""
        if current() is None:
            return self._replaced.random_normal(shape, mean, stddev, dtype, nonce)
        drawn = _normal(self._bits(shape), shape)
        return tf.cast(drawn, dtype or tf_keras.backend.floatx()) * stddev + mean

    def truncated_normal(self, shape: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        """Refused in a step: rejection sampling takes a varying count of numbers a row."""
        if current() is None:
            return self._replaced.truncated_normal(shape, *args, **kwargs)
        raise self._refusal("draws from a truncated normal")

    def make_seed_for_stateless_op(self) -> tf.Tensor:
        """Refused in a step: the layer would draw for its local batch, not for global rows."""
        if current() is None:
            return self._replaced.make_seed_for_stateless_op()
        raise self._refusal("draws for its whole local batch at once")

    def make_legacy_seed(self) -> int | None:
        """Refused in a step, as `make_seed_for_stateless_op`."""
        if current() is None:
            return self._replaced.make_legacy_seed()
        raise self._refusal("draws for its whole local batch at once")

    def _refusal(self, what: str) -> UsageError:
        return UsageError(
            f"Layer {self._name} {what}, which cannot be keyed by the rows of the global batch: "
            "do it in the input pipeline, or with a layer that draws a number an element."
        )

    def _uniform(self, shape: Any, shared: bool = False) -> tf.Tensor:
        """float32 numbers in [0, 1); `shared` ones are the same for all rows of the batch."""
        bits = self._bits(shape, shared)
        return tf.reshape(_to_unit(bits)[:, : _row_size(shape)[0]], shape)

    def _bits(self, shape: Any, shared: bool = False) -> tf.Tensor:
        """[rows, blocks x 4] uint32, whole Philox blocks a row.

        Bits, since XLA makes other floats of the same bits than TensorFlow's kernels do.
        """
        rows = current()
        assert rows is not None  # asked by every caller
        call = rows.calls.get(self._identity[1], 0)
        rows.calls[self._identity[1]] = call + 1
        blocks = _row_size(shape)[1]
        first = tf.cast(0 if shared else rows.first_row, tf.uint64)
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=tf.stack([shape[0], blocks * _BLOCK]),
            key=tf.constant([_key(*self._identity, call)], tf.uint64),
            counter=tf.stack([first * tf.cast(blocks, tf.uint64), tf.cast(rows.step, tf.uint64)]),
            alg=_PHILOX,
            dtype=tf.uint32,
        )


def _to_unit(bits: tf.Tensor) -> tf.Tensor:
    """uint32 -> float32 in [0, 1): 23 bits as the fraction of a number in [1, 2), less 1."""
    one = tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(bits, 0x7FFFFF), 0x3F800000)
    return tf.bitcast(one, tf.float32) - 1.0


def _normal(bits: tf.Tensor, shape: Any) -> tf.Tensor:
    """Two normal numbers of every two uniform ones, by Box and Muller (1958)."""
    pairs = tf.reshape(_to_unit(bits), tf.concat([tf.shape(bits)[:1], [-1, 2]], axis=0))
    radius = tf.sqrt(-2.0 * tf.math.log(1.0 - pairs[..., 0]))
    angle = 2.0 * math.pi * pairs[..., 1]
    both = tf.stack([radius * tf.cos(angle), radius * tf.sin(angle)], axis=-1)
    flat = tf.reshape(both, tf.shape(bits))
    return tf.reshape(flat[:, : _row_size(shape)[0]], shape)


def _static_first(shape: Any) -> int | None:
    """The first number of a shape, where it is known before the step runs."""
    known = tf.get_static_value(tf.convert_to_tensor(shape), partial=True)
    return None if known is None else known[0]


def _row_size(shape: Any) -> tuple[Any, Any]:
    """How many numbers a row takes, and in how many Philox blocks."""
    inner: Sequence[Any] | tf.Tensor = shape[1:]
    static = tf.get_static_value(tf.convert_to_tensor(inner, tf.int32))
    if static is not None:
        size = math.prod(int(n) for n in static)
        return size, -(-size // _BLOCK)
    product = tf.reduce_prod(inner)
    return product, -(-product // _BLOCK)


def _key(seed: int, layer: str, layer_seed: int | None, call: int) -> int:
    text = f"ctl {seed} {layer} {layer_seed} {call}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
