"""PowerSGD on matrices: a step by hand, exact cases, and values that could become NaN or hide one."""

import numpy as np
import pytest
import tensorflow as tf

from ctl.replica.updates.powersgd import PowerSgd, orthonormalize, sum_elements


def reduce(method, matrices, factors, others=(), dtype=tf.float64):
    """Reduces on one replica; returns updates, errors, factors and the other sums as arrays."""
    results = method.reduce(
        [tf.constant(matrix, dtype) for matrix in matrices],
        [tf.constant(factor, dtype) for factor in factors],
        [tf.constant(other, dtype) for other in others],
        lambda values: list(values),
    )
    return [[value.numpy() for value in part] for part in results]


def test_a_step_of_rank_1_by_hand():
    matrix = [[3.0, 1.0, 0.0, 0.0], [4.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 2.0]]
    (update,), (error,), (factor,), (other,) = reduce(
        PowerSgd(1, seed=0), [matrix], [[[1.0], [0.0], [0.0], [0.0]]], [7.0]
    )
    # M q = (3, 4, 0), p = (0.6, 0.8, 0), M^T p = (5, 0.6, 0.8, 0), which has the norm sqrt(26).
    expected = [[3.0, 0.36, 0.48, 0.0], [4.0, 0.48, 0.64, 0.0], [0.0, 0.0, 0.0, 0.0]]
    np.testing.assert_allclose(update, expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(error, np.subtract(matrix, expected), rtol=0, atol=1e-15)
    np.testing.assert_allclose(
        factor[:, 0], np.array([5.0, 0.6, 0.8, 0.0]) / 26**0.5, rtol=0, atol=1e-15
    )
    assert other == 7.0


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_gradient_of_at_most_the_rank_is_exact(rank):
    random = np.random.default_rng(rank)
    matrix = random.normal(size=(9, rank)) @ random.normal(size=(rank, 7))
    method = PowerSgd(2, seed=1)
    first = method.initial_factor((9, 7), 0)
    (update,), (error,), (factor,), _ = reduce(method, [matrix], [first])
    np.testing.assert_allclose(update, matrix, rtol=0, atol=1e-14)
    np.testing.assert_allclose(error, 0.0, rtol=0, atol=1e-14)
    # A direction that the matrix does not have is kept for the next step, and not made from noise.
    assert [np.array_equal(factor[:, i], first[:, i]) for i in range(2)] == [rank < 1, rank < 2]
    np.testing.assert_allclose(np.linalg.norm(factor, axis=0), 1.0, rtol=0, atol=1e-15)


def test_repeated_steps_find_the_best_approximation_of_a_matrix():
    matrix = np.random.default_rng(0).normal(size=(12, 10)) * np.arange(1, 11)
    method = PowerSgd(2, seed=0)
    factor = method.initial_factor((12, 10), 0)
    for _ in range(300):
        (update,), _, (factor,), _ = reduce(method, [matrix], [factor])
    u, s, v = np.linalg.svd(matrix)
    np.testing.assert_allclose(update, u[:, :2] * s[:2] @ v[:2], rtol=0, atol=1e-8)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [(0, 0), (8, 6)])
def test_an_element_that_is_not_finite_makes_the_update_not_finite(bad, place):
    matrix = np.random.default_rng(0).normal(size=(9, 7))
    matrix[place] = bad
    method = PowerSgd(2, seed=1)
    (update,), *_ = reduce(method, [matrix], [method.initial_factor((9, 7), 0)])
    assert not np.isfinite(update).all()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18])
def test_float32_gradients_of_any_size_are_projected(scale):
    random = np.random.default_rng(0)
    matrix = random.normal(size=(9, 2)) @ random.normal(size=(2, 7)) * scale
    method = PowerSgd(2, seed=1)
    (update,), *_ = reduce(method, [matrix], [method.initial_factor((9, 7), 0)], dtype=tf.float32)
    np.testing.assert_allclose(update, matrix, rtol=0, atol=2e-6 * np.abs(matrix).max())


def test_columns_are_orthonormal_and_dependent_ones_are_zero():
    columns = np.random.default_rng(0).normal(size=(30, 4))
    columns[:, 1] = columns[:, 0] * (1 + 1e-12)  # the same direction, except for rounding
    columns[:, 2] = columns[:, 0] + 1e-4 * columns[:, 2]  # almost the same
    basis, valid = orthonormalize(tf.constant(columns))
    assert valid.numpy().tolist() == [True, False, True, True]
    expected = np.diag([1.0, 0.0, 1.0, 1.0])
    np.testing.assert_allclose(basis.numpy().T @ basis.numpy(), expected, rtol=0, atol=1e-14)


def test_update_is_a_sum_of_outer_products_whose_bits_do_not_depend_on_the_cpu():
    """Fused multiply-adds, which only some CPUs have, would give other bits."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(300, 200)).astype("float32")
    method = PowerSgd(4, seed=0)
    factor = tf.constant(method.initial_factor((300, 200), 0), tf.float32)
    products = []

    def record(values):
        products.extend(values)
        return list(values)

    (update,), *_ = method.reduce([tf.constant(matrix)], [factor], [], record)
    left, right = orthonormalize(products[0])[0].numpy(), products[1].numpy()
    expected = left[:, :1] * right[:, 0]
    for i in range(1, 4):
        expected = expected + left[:, i : i + 1] * right[:, i]
    assert np.array_equal(update.numpy(), expected)


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 200_000, 2_000_000])
def test_long_sums_are_sums_of_short_blocks(count):
    values = np.random.default_rng(0).normal(size=count).astype("float32")
    total = sum_elements(tf.constant(values)).numpy()
    assert total == pytest.approx(values.astype("float64").sum(), abs=1e-3)
    # No more than 1,024 values in a sum: one thread computes it.
    sums = values
    while len(sums) > 1024:
        blocks = [sums[i : i + 1024] for i in range(0, len(sums), 1024)]
        sums = np.array([tf.reduce_sum(np.pad(b, [0, 1024 - len(b)])).numpy() for b in blocks])
    assert total == tf.reduce_sum(sums).numpy()


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((320, 1280), (320, 1280)),
        ((3, 3, 64, 128), (576, 128)),  # a convolution
        ((320, 4, 80), (320, 320)),  # the kernel of the queries of an attention
        ((4, 80, 320), (320, 320)),
        ((4, 4), None),  # two factors of rank 2 have as many elements
        ((5, 4), (5, 4)),
        ((1000,), None),
        ((1000, 1), None),
        ((), None),
    ],
)
def test_variables_are_seen_as_the_matrix_with_the_smallest_factors(shape, matrix):
    method = PowerSgd(2, seed=0)
    assert method.matrix_shape(shape) == matrix
    assert method.applies(shape) == (matrix is not None)
    assert method.sent_bytes(shape, tf.float64) == (2 * 8 * sum(matrix) if matrix else 0)


def test_first_directions_depend_on_the_seed_and_the_variable_only():
    factors = [
        PowerSgd(2, seed=seed).initial_factor((9, 7), index)
        for seed, index in ((0, 0), (0, 0), (1, 0), (0, 1))
    ]
    assert np.array_equal(factors[0], factors[1])
    assert not np.allclose(factors[0], factors[2]) and not np.allclose(factors[0], factors[3])
