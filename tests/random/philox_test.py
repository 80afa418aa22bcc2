"""The bits are those of Philox4x32-10, and rows have counters of their own."""

import numpy as np
import pytest
import tensorflow as tf

from ctl.random import philox


def philox4x32(key, counter):
    """One block, written from the paper's definition."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        one, two = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (two >> 32) ^ c1 ^ k0, two & 0xFFFFFFFF
        c2, c3 = (one >> 32) ^ c3 ^ k1, one & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def split(number):
    return number & 0xFFFFFFFF, number >> 32


def test_block_function_has_the_published_answers():
    # Salmon et al. 2011, kat_vectors of Random123: all zeros, and all ones.
    assert philox4x32((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    expected = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox4x32((ones, ones), (ones,) * 4) == expected


def test_bits_of_a_row_are_the_blocks_of_its_counters():
    key, step = philox.make_key("layer 3"), 5
    bits = philox.draw_bits(3, 2, key=key, first=4, step=step).numpy()
    for row in range(3):
        counters = [(4 + row) * 2, (4 + row) * 2 + 1]
        blocks = [philox4x32(split(int(key[0])), (*split(c), *split(step))) for c in counters]
        assert bits[row].tolist() == [number for block in blocks for number in block]


def test_keys_of_names_and_of_iterations_differ():
    key = philox.make_key("a")
    keys = [key, philox.make_key("b"), *(philox.fold_in(key, tf.constant(i)) for i in range(3))]
    assert len({int(each[0]) for each in keys}) == len(keys)
    assert int(philox.make_key("a")[0]) == int(key[0])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_unit_numbers_are_below_1_in_every_dtype(dtype):
    bits = tf.constant([[0, 2**32 - 1, 2**22, 1]], tf.uint32)
    unit = tf.cast(philox.to_unit(bits, dtype), dtype).numpy().astype(np.float64)[0]
    assert unit.min() == 0 and unit.max() < 1
    assert unit[2] == 0.5


def test_integers_cover_their_range():
    bits = tf.constant([[0, 2**31, 2**32 - 1]], tf.uint32)
    assert philox.to_integers(bits, -3, 7, tf.int32).numpy().tolist() == [[-3, 2, 6]]
    assert philox.to_integers(bits, 0, 2**32, tf.int64).numpy().tolist() == [[0, 2**31, 2**32 - 1]]


def test_normal_numbers_are_the_polar_coordinates_of_two_unit_numbers():
    bits = tf.constant([[2**22, 2**21, 2**21, 0]], tf.uint32)  # 1/2, 1/4; 1/4, 0
    normal = philox.to_normal(bits, tf.float64).numpy()[0]
    radius = np.sqrt(2 * np.log([2, 4 / 3]))
    np.testing.assert_allclose(normal, [0, radius[0], radius[1], 0], atol=1e-12)
