"""Philox4x32-10 random bits, and the numbers that are made of them.

The block function of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", maps a key of
64 bits and a counter of 128 bits to a block of four 32-bit numbers. It has no state: a number comes
from its key and its counter alone, on every replica alike. docs/step.md, section 10, defines the bits.
"""

from collections.abc import Sequence
import hashlib
import math
from typing import TypeAlias

import tensorflow as tf

from ctl.graphs.ops import KEYED_BITS

Number: TypeAlias = float | tf.Tensor  # also a tensor that broadcasts to the shape that is drawn
Shape: TypeAlias = Sequence[int | tf.Tensor | None] | tf.Tensor
BLOCK = 4  # 32-bit numbers per block

_ALGORITHM = 1  # tf.random.Algorithm.PHILOX, as a number for raw ops
# The upper half of the counter is the step; no step has this number.
_FOLD = 2**64 - 1
# float32 has 23 bits after the point, of which 16-bit floats keep these. With more bits, a number just
# below 1 would be rounded to 1.
_FRACTION = {tf.float16: 0x7FE000, tf.bfloat16: 0x7F0000}


def make_key(identity: str) -> tf.Tensor:
    """Returns the key [1] uint64 of a stream of numbers."""
    # A cryptographic hash gives unrelated keys to streams with similar names, in every process the same
    # ones, unlike Python's own hash of a string.
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return tf.constant([int.from_bytes(digest, "little")], tf.uint64)


def fold_in(key: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Returns a key [1] uint64 made of another key and a number, such as an iteration of a loop."""
    counter = tf.stack([tf.cast(number, tf.uint64), tf.constant(_FOLD, tf.uint64)])
    return tf.reshape(tf.bitcast(_draw([2], key, counter), tf.uint64), [1])


def draw_bits(
    rows: Number, blocks: Number, *, key: tf.Tensor, first: Number, step: Number
) -> tf.Tensor:
    """Draws the blocks of consecutive rows.

    Args:
        rows: the number of rows.
        blocks: the number of blocks of each row.
        key: [1] uint64 from `make_key`.
        first: the number of the first row.
        step: the upper half of the counter.

    Returns:
        [rows, blocks x 4] uint32. Row `i` has the counters (first + i) x blocks and the following.
    """
    # Complete blocks for each row, so that the counter of a row depends on its position alone.
    first = tf.cast(first, tf.uint64) * tf.cast(blocks, tf.uint64)
    return _draw(tf.stack([rows, blocks * BLOCK]), key, tf.stack([first, tf.cast(step, tf.uint64)]))


def _draw(shape: Shape, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    # It draws bits and not floats, because XLA converts the same bits to other floats than TensorFlow's
    # kernels. Only the raw op accepts key and counter: one call draws the blocks of consecutive
    # counters, which belong to consecutive rows.
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key, counter=counter, alg=_ALGORITHM, dtype=tf.uint32, name=KEYED_BITS
    )


def to_unit(bits: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Converts uint32 to float32 in [0, 1), which casts to `dtype` without rounding."""
    # 23 bits become the fraction of a number in [1, 2); subtracting 1 is exact.
    fraction = tf.bitwise.bitwise_and(bits, _FRACTION.get(dtype, 0x7FFFFF))
    return tf.bitcast(tf.bitwise.bitwise_or(fraction, 0x3F800000), tf.float32) - 1.0


def working_dtype(dtype: tf.DType) -> tf.DType:
    """Returns float64 for float64, and float32 for all others.

    TensorFlow's kernels compute the last elements of a tensor by other instructions, so that logarithms
    and cosines can differ in the last bit from one split to another.
    """
    return tf.float64 if dtype == tf.float64 else tf.float32


def to_normal(bits: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Converts [rows, 2 n] uint32 to normal numbers, in pairs (Box and Muller 1958).

    Args:
        bits: random bits.
        dtype: the dtype that the numbers are for.

    Returns:
        [rows, 2 n] numbers in the working dtype.
    """
    unit = tf.cast(to_unit(bits), working_dtype(dtype))
    pairs = tf.reshape(unit, tf.concat([tf.shape(bits)[:1], [-1, 2]], axis=0))
    # 1 - u is in (0, 1], so that its logarithm is finite.
    radius = tf.sqrt(-2.0 * tf.math.log(1.0 - pairs[..., 0]))
    angle = 2.0 * math.pi * pairs[..., 1]
    normal = tf.stack([radius * tf.cos(angle), radius * tf.sin(angle)], axis=-1)
    return tf.reshape(normal, tf.shape(bits))


def to_integers(bits: tf.Tensor, low: Number, high: Number, dtype: tf.DType) -> tf.Tensor:
    """Converts uint32 to integers in [low, high), of which there must be at most 2^32."""
    # The upper half of the product (Lemire 2019): XLA computes a modulo slowly. The probability
    # of a value differs from 1 / n by less than 2^-32.
    low, high = tf.cast(low, tf.int64), tf.cast(high, tf.int64)
    product = tf.cast(bits, tf.uint64) * tf.cast(high - low, tf.uint64)
    offset = tf.cast(tf.bitwise.right_shift(product, tf.constant(32, tf.uint64)), tf.int64)
    return tf.cast(low + offset, dtype)
