"""Sums over the replicas: dense, sparse and missing gradients, and the loss."""

import pytest
import tensorflow as tf

from ctl import testing
from ctl.update import reduction


@pytest.mark.parametrize("replicas", [1, 4])
def test_all_reduce_sums_dense_and_sparse_and_keeps_none(replicas):
    where = testing.make_strategy(replicas)

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        value = tf.cast(replica + 1, tf.float64)
        sparse = tf.IndexedSlices(
            tf.reshape(value, [1, 1]), tf.reshape(replica % 2, [1]), tf.constant([3, 1])
        )
        reduced, loss = reduction.all_reduce([value * [1.0, 2.0], None, sparse], value * 10)
        assert reduced[1] is None
        assert isinstance(reduced[2], tf.IndexedSlices)
        return reduced[0], tf.convert_to_tensor(reduced[2]), loss

    results = tf.function(lambda: where.run(step))()
    total = replicas * (replicas + 1) / 2
    rows = [sum(r + 1 for r in range(replicas) if r % 2 == i) for i in (0, 1)]
    for value in where.experimental_local_results(results[0]):
        assert value.numpy().tolist() == [total, 2 * total]
    for value in where.experimental_local_results(results[1]):
        assert value.numpy().tolist() == [[rows[0]], [rows[1]], [0.0]]
    for value in where.experimental_local_results(results[2]):
        assert value.numpy() == 10 * total
