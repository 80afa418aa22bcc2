"""Computes the examples in the global batch of a step, as a function of (seed, step) alone.

Position p of the training stream is example `permutation_e(p mod n)` of epoch `e = p div n`, for a
source of n examples. Step k takes the positions [k B, (k + 1) B) and continues across epochs, so a
training batch is always full. Each position is computed without the positions before it, so a
resumed run seeks instead of reading from the beginning.

The random numbers of epoch e are block e of the seed's Philox stream (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"). For a large n they key a block cipher that permutes [0, n)
without a table (TensorFlow's `RandomIndexShuffle`); for a small n they are sorted. The public
`tf.random.experimental.index_shuffle` is not suitable: at n = 60,000 it reduces seed and epoch
modulo 256, and with its four rounds the orders of consecutive epochs have a correlation of 0.9.
"""

import hashlib
import math

import tensorflow as tf

_PHILOX = 1  # tf.random.Algorithm.PHILOX, as a number for the raw op
_BLOCK = 4  # 32-bit numbers in a Philox block
# Cipher rounds. Four rounds leave a visible correlation between epochs; with 8 or more the orders
# cannot be distinguished from those of numpy.
_ROUNDS = 16
# Up to this number of examples sorting is fast; the cipher is designed for 2^16 or more indexes
# and slow below.
_MAX_SORTED = 2048


def example_indexes(positions: tf.Tensor, *, count: int, seed: int, span: int) -> tf.Tensor:
    """Returns the examples at positions of the endless, shuffled training stream.

    Args:
        positions: [rows] int64; the first must be the smallest.
        count: number of examples in the source.
        seed: the run's seed.
        span: upper bound of the difference to the first position, exclusive. It is static, so that
            the number of epochs that the positions may touch is, too.

    Returns:
        [rows] int64 indexes of examples, each in [0, count).
    """
    epoch, place = positions // count, positions % count
    first = epoch[0]
    epochs = _epochs_touched(span, count)
    if count <= _MAX_SORTED:
        # A stable sort is deterministic even if two of the random numbers are equal.
        numbers = _random_numbers(seed, first, epochs, width=count)
        orders = tf.argsort(numbers, direction="DESCENDING", stable=True)
        return tf.cast(tf.gather_nd(orders, tf.stack([epoch - first, place], axis=1)), tf.int64)
    keys = tf.gather(_random_numbers(seed, first, epochs, width=3), epoch - first)
    return _permute(place, keys, count)


def block_indexes(
    positions: tf.Tensor, *, count: int, seed: int, span: int, rows: int, window: int
) -> tf.Tensor:
    """Returns the examples at positions of a stream in which neighbors are used at about the same time.

    Each epoch permutes blocks of `rows` examples, and then the examples of each `window`. The examples
    that do not fill a block are among the last window. With fewer than two windows, or blocks of one
    example, the order is that of `example_indexes`.

    Args:
        positions: as for `example_indexes`.
        count: number of examples in the source.
        seed: the run's seed.
        span: as for `example_indexes`.
        rows: examples in a block.
        window: examples that are shuffled together; a multiple of `rows`.
    """
    if count < 2 * window or rows == 1:
        return example_indexes(positions, count=count, seed=seed, span=span)
    epoch, place = positions // count, positions % count
    windows, blocks = count // window, count // rows
    number = tf.minimum(place // window, windows - 1)
    inside = place - number * window
    # Each window of each epoch has its own key. The last one is larger by what does not fill a window.
    key = epoch * windows + number
    keys = _random_numbers(derive_seed(seed, "windows"), key[0], 2 + span // window, width=3)
    keys = tf.gather(keys, key - key[0])
    last = count - (windows - 1) * window
    inside = tf.where(
        number == windows - 1,
        _permute(inside, keys, last),
        _permute(tf.minimum(inside, window - 1), keys, window),
    )
    slot, row = (number * window + inside) // rows, inside % rows
    block = example_indexes(
        epoch * blocks + tf.minimum(slot, blocks - 1),
        count=blocks,
        seed=seed,
        span=(_epochs_touched(span, count) - 1) * blocks + 1,
    )
    return tf.where(slot < blocks, block, blocks) * rows + row


def augmentation_seeds(
    positions: tf.Tensor, indexes: tf.Tensor, *, count: int, seed: int, span: int
) -> tf.Tensor:
    """Returns seeds for stateless random functions, each a function of (seed, epoch, example).

    Args:
        positions: as for `example_indexes`.
        indexes: [rows] int64, the examples at these positions.
        count: number of examples in the source.
        seed: the run's seed.
        span: as for `example_indexes`.

    Returns:
        [rows, 2] int64: a random number of the epoch, and the example's index.
    """
    epoch = positions // count
    epochs = _epochs_touched(span, count)
    numbers = _random_numbers(derive_seed(seed, "augmentation"), epoch[0], epochs, width=2)
    return tf.stack([tf.gather(tf.bitcast(numbers, tf.int64), epoch - epoch[0]), indexes], axis=1)


def position_seed(position: tf.Tensor, *, seed: int) -> tf.Tensor:
    """Returns a [2] int64 seed for an example of unknown epoch, from its position in the stream."""
    key = tf.constant(derive_seed(seed, "augmentation") - 2**63, tf.int64)
    return tf.stack([key, position])


def _epochs_touched(span: int, count: int) -> int:
    """Returns the largest number of epochs that positions less than `span` apart can lie in."""
    return 1 + (span + count - 2) // count


def derive_seed(seed: int, purpose: str) -> int:
    """Returns a 64-bit seed whose random numbers are independent of those for other purposes."""
    digest = hashlib.blake2b(f"ctl {purpose} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _permute(place: tf.Tensor, keys: tf.Tensor, count: int) -> tf.Tensor:
    """Permutes places in [0, count), each with its own key."""
    # Where count - 1 is a power of two (2^16, 2^18, ...), RandomIndexShuffle never returns the last
    # index and returns another one twice. There it permutes [0, count] instead, and the place that
    # gets the surplus index `count` takes the value at place `count`.
    last = count - 1
    power_of_two = last & (last - 1) == 0
    if power_of_two:
        last = count

    def shuffle(index: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.RandomIndexShuffle(
            index=index, seed=keys, max_index=tf.constant(last, tf.int64), rounds=_ROUNDS
        )

    indexes = shuffle(place)
    if power_of_two:
        indexes = tf.where(indexes == last, shuffle(tf.zeros_like(place) + last), indexes)
    return indexes


def _random_numbers(seed: int, first: tf.Tensor, epochs: int, *, width: int) -> tf.Tensor:
    """Returns [epochs, width] int32 numbers of consecutive epochs, functions of (seed, epoch)."""
    blocks = math.ceil(width / _BLOCK)
    numbers = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[epochs, blocks * _BLOCK],
        key=tf.constant([seed % 2**64], tf.uint64),
        counter=tf.cast(tf.stack([first * blocks, tf.zeros_like(first)]), tf.uint64),
        alg=_PHILOX,
        dtype=tf.int32,
    )
    return numbers[:, :width]
