"""Sampler: one random permutation per epoch, computed at any position."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from ctl.data import sampler

# Below and above the count at which sorting changes to the cipher, and around powers of two.
COUNTS = [1, 2, 7, 2048, 2049, 4097, 60_000, 2**16, 2**16 + 1, 2**18 + 1]
BEYOND_INT32 = 3 * 2**31 + 5


def stream(start, stop, *, count, seed=0):
    """Positions [start, stop) of the shuffled stream."""
    positions = tf.range(start, stop, dtype=tf.int64)
    return sampler.example_indexes(positions, count=count, seed=seed, span=stop - start).numpy()


@pytest.mark.parametrize("count", COUNTS)
def test_every_epoch_has_every_example_exactly_once(count):
    for epoch in (0, 1, 1000):
        order = stream(epoch * count, (epoch + 1) * count, count=count)
        assert np.array_equal(np.sort(order), np.arange(count))


@pytest.mark.parametrize("count", [10, 60_000])
def test_epochs_and_seeds_differ_even_far_apart_and_seeds_may_be_any_integer(count):
    numbers = (0, 1, 2, 256, 512, 65_536)
    orders = [stream(e * count, (e + 1) * count, count=count) for e in numbers]
    for seed in (*numbers[1:], 2**32, 2**63, -1, -2):
        orders.append(stream(0, count, count=count, seed=seed))
    assert len({order.tobytes() for order in orders}) == len(orders)


@pytest.mark.parametrize(("count", "rows"), [(1, 7), (5, 1), (5, 64), (3000, 2)])
def test_any_slice_is_computed_without_the_rest_of_the_stream(count, rows):
    complete = stream(0, 150, count=count)
    for start in range(0, 150 - rows, 13):
        part = stream(start, start + rows, count=count)
        assert np.array_equal(part, complete[start : start + rows])


def test_indexes_do_not_depend_on_the_other_positions_of_a_call():
    complete = stream(0, 12, count=5)
    positions = tf.constant([3, 3, 4, 7, 11, 11, 11, 11, 11], tf.int64)
    indexes = sampler.example_indexes(positions, count=5, seed=0, span=9)
    assert np.array_equal(indexes, complete[positions.numpy()])


@pytest.mark.parametrize("count", [7, 2048, 60_000, 2**31, BEYOND_INT32, 2**40])
def test_positions_and_counts_beyond_int32_stay_exact(count):
    start = 2**40 + 12_345
    near = stream(start, start + 500, count=count)
    assert near.dtype == np.int64
    assert 0 <= near.min() <= near.max() < count
    in_epoch = near[: min(500, count - start % count)]
    assert len(set(in_epoch[:count])) == min(len(in_epoch), count)
    assert np.array_equal(stream(start + 499, start + 500, count=count), near[499:])
    if count > 2**33:
        assert near.max() > 2**32


@pytest.mark.parametrize(
    ("count", "seed", "start", "expected"),
    [
        (10, 0, 0, [0, 5, 9, 7, 8, 4, 1, 2, 6, 3, 8, 3, 1, 9, 6, 4, 7, 0, 5, 2]),
        (10, 7, 1_000_005, [9, 1, 6, 0, 8, 4, 3, 7, 8, 2]),
        (60_000, 0, 0, [45126, 52211, 46442, 55228, 38333, 26198, 4893, 931]),
        (60_000, 7, 59_996, [16481, 9953, 19243, 35267, 35856, 19741, 58511, 14798]),
        (2**40, 1, 2**41 - 3, [673781432745, 1078809299237, 732346848916, 429931934329]),
    ],
)
def test_order_is_the_one_that_existing_checkpoints_rely_on(count, seed, start, expected):
    indexes = stream(start, start + len(expected), count=count, seed=seed)
    assert indexes.tolist() == expected


@pytest.mark.parametrize("count", [2000, 60_000])
def test_orders_of_consecutive_epochs_are_not_correlated(count):
    epochs = [stream(e * count, (e + 1) * count, count=count, seed=5) for e in range(9)]
    seeds = [stream(0, count, count=count, seed=seed) for seed in range(9)]
    for orders in (epochs, seeds):
        correlations = [np.corrcoef(a, b)[0, 1] for a, b in itertools.pairwise(orders)]
        assert np.abs(correlations).max() < 5 / np.sqrt(count)
        assert abs(np.mean(correlations)) < 4 / np.sqrt(count * len(correlations))


def test_distances_of_consecutive_examples_are_distributed_as_by_chance():
    count, epochs = 60_000, 20
    orders = np.stack([stream(e * count, (e + 1) * count, count=count) for e in range(epochs)])
    steps = np.bincount(np.diff(orders, axis=1).ravel() % count, minlength=count)[1:]
    assert steps.var() / steps.mean() == pytest.approx(1, abs=0.05)  # Poisson


@pytest.mark.parametrize("count", [2, 3, 10])
def test_each_example_is_at_each_place_equally_often(count):
    epochs = 2000
    order = stream(0, epochs * count, count=count).reshape(epochs, count)
    table = np.stack([np.bincount(order[:, place], minlength=count) for place in range(count)])
    expected = epochs / count
    deviation = ((table - expected) ** 2 / expected).sum() / (count * (count - 1))
    assert deviation < 3  # about 1 by chance
