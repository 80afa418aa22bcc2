"""PowerSGD on matrices by hand, and 16-bit sums: errors are kept, and NaN is neither made nor hidden."""

import numpy as np
import pytest
import tensorflow as tf

from ctl import testing
from ctl.replica.updates.compression import (
    PowerSgd,
    SixteenBit,
    orthonormalize,
    sum_elements,
)


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
    step = tf.function(lambda factor: method.reduce([tf.constant(matrix)], [factor], [], list))
    for _ in range(300):
        (update,), _, (factor,), _ = step(tf.constant(factor))
    u, s, v = np.linalg.svd(matrix)
    np.testing.assert_allclose(update, u[:, :2] * s[:2] @ v[:2], rtol=0, atol=1e-8)


@pytest.mark.parametrize(("bad", "place"), [(-np.inf, (0, 0)), (np.nan, (8, 6))])
def test_an_element_that_is_not_finite_makes_the_update_not_finite(bad, place):
    matrix = np.random.default_rng(0).normal(size=(9, 7))
    matrix[place] = bad
    method = PowerSgd(2, seed=1)
    (update,), *_ = reduce(method, [matrix], [method.initial_factor((9, 7), 0)])
    assert not np.isfinite(update).all()


@pytest.mark.parametrize("scale", [1e-30, 1e18])
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


@pytest.mark.parametrize("count", [0, 1024, 1025, 1_050_000])
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
        ((3, 3, 64, 128), (576, 128)),  # a convolution
        ((320, 4, 80), (320, 320)),  # the kernel of the queries of an attention
        ((4, 4), None),  # two factors of rank 2 have as many elements
        ((5, 4), (5, 4)),
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


# 16-bit sums.


def send(dtype, gradients, steps=1):
    """Sums [replicas, n] gradients in each step: the [steps, n] updates and the [replicas, n] errors."""
    where = testing.make_strategy(len(gradients))
    method, updates = SixteenBit(dtype), []
    values = tf.constant(gradients, tf.float32)
    errors = [tf.zeros_like(value) for value in values]

    @tf.function
    def reduce_once(errors):
        def step():
            context = tf.distribute.get_replica_context()
            index = context.replica_id_in_sync_group
            value = tf.gather(values, index) + tf.gather(errors, index)
            (update,), (error,), _, _ = method.reduce(
                [value], [], [], lambda sent: [context.all_reduce("SUM", v) for v in sent]
            )
            return update, error

        return where.run(step)

    for _ in range(steps):
        update, error = reduce_once(tf.stack(errors))
        errors = where.experimental_local_results(error)
        copies = [copy.numpy() for copy in where.experimental_local_results(update)]
        assert all(np.array_equal(copies[0], copy, equal_nan=True) for copy in copies)
        updates.append(copies[0])
    return np.array(updates, np.float64), np.array([error.numpy() for error in errors], np.float64)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_updates_and_the_error_sum_to_the_gradients(dtype):
    gradient = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    updates, errors = send(dtype, gradient, steps=20)
    assert np.abs(updates[0] - gradient[0]).max() > 1e-4  # rounded
    # The additions in float32 round by 2^-24.
    np.testing.assert_allclose(updates.sum(0) + errors[0], 20 * gradient[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(updates.mean(0), gradient[0], rtol=0, atol=1e-3)


def test_elements_below_the_range_of_float16_are_sent_once_they_have_added_up():
    updates, errors = send(tf.float16, [[1e-8], [1e-8]], steps=30)
    assert updates[0] == 0.0 and (updates > 0).any()
    assert updates.sum() + errors.sum() == pytest.approx(6e-7, rel=1e-5)
    assert updates.sum() > 4e-7


def test_elements_above_the_range_of_float16_are_sent_in_parts():
    replicas = 3
    updates, errors = send(tf.float16, [[1e5, -1e5]] * replicas, steps=2)
    assert np.isfinite(updates).all() and np.abs(updates).min() >= 2**14
    sums = updates.sum(0) + errors.sum(0)
    np.testing.assert_allclose(sums, [2e5 * replicas, -2e5 * replicas], rtol=1e-6)


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_an_element_that_is_not_finite_stays_not_finite(bad):
    updates, _ = send(tf.float16, [[1.0, bad], [1.0, 1.0]])
    assert updates[0][0] == 2.0 and not np.isfinite(updates[0][1])


def test_an_element_is_sent_in_two_bytes():
    assert SixteenBit(tf.bfloat16).sent_bytes((3, 4), tf.float64) == 24
