"""Moments of a global batch: accurate in float32, and the same bits on every replica."""

import numpy as np
import pytest
import tensorflow as tf

from ctl import testing
from ctl.rows import moments


def test_moments_of_two_replicas_by_hand():
    # 1, 3 | 8: the mean is 4, and the squared deviations 9, 1, 16 sum to 26.
    where = testing.make_strategy(2)
    parts = [tf.constant([[1.0], [3.0]]), tf.constant([[8.0], [0.0]])]
    masks = [tf.constant([True, True]), tf.constant([True, False])]
    x, included = (
        where.experimental_distribute_values_from_function(
            lambda context, values=values: values[context.replica_id_in_sync_group]
        )
        for values in (parts, masks)
    )

    def replica_step(x, included):
        shift, local = moments.local_moments(x, included, [0])
        return shift, local, moments.merge(local)

    shift, local, merged = tf.function(lambda *a: where.run(replica_step, args=a))(x, included)
    local_values = zip(*(where.experimental_local_results(v) for v in local), strict=True)
    assert [[v.numpy().ravel().tolist() for v in values] for values in local_values] == [
        [[2.0], [2.0], [0.0], [2.0]],
        [[1.0], [8.0], [0.0], [0.0]],
    ]
    assert [v.numpy().tolist() for v in where.experimental_local_results(shift)] == [[[2]], [[8]]]
    for replica in range(2):
        count, mean, error, squares = (where.experimental_local_results(v)[replica] for v in merged)
        assert (float(count), float(mean[0] + error[0])) == (3.0, 4.0)
        assert float(squares[0]) == pytest.approx(26.0, rel=1e-6)


def test_moments_of_no_elements_are_zero():
    _, empty = moments.local_moments(tf.zeros([0, 2]), None, [0])
    assert [v.numpy().tolist() for v in empty] == [0.0, [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_zero_outside_replaces_nan_too():
    values = tf.constant([[1.0, 2.0], [np.nan, np.inf]])
    masked = moments.zero_outside(tf.constant([True, False]), values)
    assert masked.numpy().tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert moments.zero_outside(None, values) is values


@pytest.mark.slow
def test_moments_of_two_million_elements_are_accurate():
    # Summed over both axes together, a CPU gives a mean that is off by 2 and a variance of 6, not 0.01.
    x = np.random.default_rng(6).normal(1000, 0.1, [1000, 2000, 2]).astype(np.float32)
    _, local = moments.local_moments(tf.constant(x), None, [0, 1])
    wide = x.astype(np.float64)
    mean = local.shift.numpy().astype(np.float64) + local.error.numpy()
    np.testing.assert_allclose(mean, wide.mean((0, 1)), rtol=1e-8)
    np.testing.assert_allclose(local.squares / 2e6, wide.var((0, 1)), rtol=1e-5)
