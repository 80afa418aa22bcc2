"""16-bit sums with error feedback: nothing is lost, too small and too large elements arrive later."""

import numpy as np
import pytest
import tensorflow as tf

from ctl import testing
from ctl.replica.updates.sixteen_bit import SixteenBit


def reduce(dtype, gradients, steps=1):
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
    updates, errors = reduce(dtype, gradient, steps=20)
    assert np.abs(updates[0] - gradient[0]).max() > 1e-4  # rounded
    # The additions in float32 round by 2^-24.
    np.testing.assert_allclose(updates.sum(0) + errors[0], 20 * gradient[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(updates.mean(0), gradient[0], rtol=0, atol=1e-3)


def test_elements_below_the_range_of_float16_are_sent_once_they_have_added_up():
    updates, errors = reduce(tf.float16, [[1e-8], [1e-8]], steps=30)
    assert updates[0] == 0.0 and (updates > 0).any()
    assert updates.sum() + errors.sum() == pytest.approx(6e-7, rel=1e-5)
    assert updates.sum() > 4e-7


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_elements_above_the_range_of_float16_are_sent_in_parts(replicas):
    updates, errors = reduce(tf.float16, [[1e5, -1e5]] * replicas, steps=2)
    assert np.isfinite(updates).all() and np.abs(updates).min() >= 2**14
    sums = updates.sum(0) + errors.sum(0)
    np.testing.assert_allclose(sums, [2e5 * replicas, -2e5 * replicas], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_element_that_is_not_finite_stays_not_finite(bad):
    updates, _ = reduce(tf.float16, [[1.0, bad], [1.0, 1.0]])
    assert updates[0][0] == 2.0 and not np.isfinite(updates[0][1])


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_an_element_is_sent_in_two_bytes(dtype):
    assert SixteenBit(tf.bfloat16).sent_bytes((3, 4), dtype) == 24
