"""Which examples make the global batch of a step: a function of (seed, step) alone.

Position p of the training stream is example `permutation_e(p mod n)` of epoch `e = p div n`; step k
takes positions [k B, (k + 1) B), running on across epochs, so that a training batch is always full.
Any position is found without those before it, so a resumed run seeks instead of reading.

Epoch e's random numbers are block e of the Philox stream of the seed (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"). They key a block cipher that permutes [0, n) in place
(TensorFlow's `RandomIndexShuffle`), or, where n is small, are sorted. The handier
`tf.random.experimental.index_shuffle` will not do: at n = 60,000 it takes seed and epoch modulo
256, and with its four rounds the orders of consecutive epochs correlate at 0.9.
"""

import hashlib
import math

import tensorflow as tf

_PHILOX = 1  # tf.random.Algorithm.PHILOX, as the raw ops number it
_BLOCK = 4  # 32-bit numbers in a Philox block
_ROUNDS = 16  # of the cipher; with 8 or more nothing tells its orders from numpy's, 4 are too few
_SORTED = 2048  # up to so many examples sorting is fast, and the cipher, made for 2^16 and up, slow


def shuffled(positions: tf.Tensor, *, count: int, seed: int, span: int) -> tf.Tensor:
    """The examples at positions of the endless, shuffled training stream.

    Args:
        positions: [rows] int64, the first the least.
        count: how many examples the source has.
        seed: the run's seed.
        span: all positions are less than so many past the first.

    Returns:
        [rows] int64 indexes of examples, each in [0, count).
    """
    epoch, place = positions // count, positions % count
    first = epoch[0]
    epochs = 1 + (span + count - 2) // count  # that these positions may touch
    if count <= _SORTED:
        numbers = _random(seed, first, epochs, width=count)
        orders = tf.argsort(numbers, direction="DESCENDING", stable=True)
        return tf.cast(tf.gather_nd(orders, tf.stack([epoch - first, place], axis=1)), tf.int64)
    keys = tf.gather(_random(seed, first, epochs, width=3), epoch - first)
    return _enciphered(place, keys, count)


def seeds(
    positions: tf.Tensor, indexes: tf.Tensor, *, count: int, seed: int, span: int
) -> tf.Tensor:
    """Seeds for stateless random functions, each a function of (seed, epoch, example).

    Args:
        positions: as for `shuffled`.
        indexes: the examples there.
        count: how many examples the source has.
        seed: the run's seed.
        span: as for `shuffled`.

    Returns:
        [rows, 2] int64: the epoch's own number, and the example.
    """
    epoch = positions // count
    epochs = 1 + (span + count - 2) // count
    numbers = _random(_other(seed), epoch[0], epochs, width=2)
    return tf.stack([tf.gather(tf.bitcast(numbers, tf.int64), epoch - epoch[0]), indexes], axis=1)


def stream_seed(position: tf.Tensor, *, seed: int) -> tf.Tensor:
    """As one of `seeds`, of an example whose epoch is not known: by its position in the stream."""
    key = tf.constant(_other(seed) - 2**63, tf.int64)
    return tf.stack([key, position])


def _other(seed: int) -> int:
    """The seed of another stream than that of the order of the examples."""
    digest = hashlib.blake2b(f"ctl augmentation {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _enciphered(place: tf.Tensor, keys: tf.Tensor, count: int) -> tf.Tensor:
    """Permutes places in [0, count), each by its own key."""
    # At count = 2^16 + 1, 2^18 + 1, ... the op never gives the last index and gives another one
    # twice. There it permutes one index more, and who gets that one takes what that one got.
    last = count - 1
    power_of_two = last & (last - 1) == 0
    if power_of_two:
        last = count

    def permuted(index: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.RandomIndexShuffle(
            index=index, seed=keys, max_index=tf.constant(last, tf.int64), rounds=_ROUNDS
        )

    found = permuted(place)
    if power_of_two:
        found = tf.where(found == last, permuted(tf.zeros_like(place) + last), found)
    return found


def _random(seed: int, first: tf.Tensor, epochs: int, *, width: int) -> tf.Tensor:
    """[epochs, width] int32 numbers of consecutive epochs, each a function of (seed, epoch)."""
    blocks = math.ceil(width / _BLOCK)
    numbers = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[epochs, blocks * _BLOCK],
        key=tf.constant([seed % 2**64], tf.uint64),
        counter=tf.cast(tf.stack([first * blocks, tf.zeros_like(first)]), tf.uint64),
        alg=_PHILOX,
        dtype=tf.int32,
    )
    return numbers[:, :width]
