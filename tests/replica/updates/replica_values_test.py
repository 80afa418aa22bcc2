"""Values of each replica in a checkpoint: the same bits on as many replicas, the same sum on others."""

import numpy as np
import pytest
import tensorflow as tf

from ctl import testing
from ctl.replica.updates.replica_values import ReplicaValues


def make(replicas):
    where = testing.make_strategy(replicas)
    with where.scope():
        reference = tf.Variable(tf.zeros([2, 3], tf.float64))
        return where, ReplicaValues(reference, "error/kernel", where)


def assign_each(where, values):
    """Sets replica r to r + 1/3 plus a value per element, by a step."""

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        new = tf.cast(replica, tf.float64) + 1 / 3
        values.local.assign(new + tf.reshape(tf.range(6, dtype=tf.float64), [2, 3]) / 7)

    tf.function(lambda: where.run(step))()


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_every_replica_gets_its_own_value_back_or_its_share_of_the_sum(tmp_path, replicas):
    where, values = make(replicas)
    assign_each(where, values)
    saved = values.numpy()
    assert saved.shape == (replicas, 2, 3)
    assert [value[0, 0] for value in saved] == [r + 1 / 3 for r in range(replicas)]
    path = tf.train.Checkpoint(values=values).write(str(tmp_path / "ckpt"))
    for others in (1, 2, 4):
        _, restored = make(others)
        tf.train.Checkpoint(values=restored).read(path).assert_consumed()
        if others == replicas:
            assert np.array_equal(restored.numpy(), saved)
        else:
            for value in restored.numpy():
                np.testing.assert_allclose(value, saved.sum(0) / others, rtol=0, atol=1e-15)


def test_only_the_chief_writes_the_values(tmp_path, monkeypatch):
    where, values = make(2)
    for is_chief in (True, False):
        monkeypatch.setattr(type(where.extended), "should_checkpoint", is_chief)
        path = tf.train.Checkpoint(values=values).write(str(tmp_path / "ckpt"))
        (shape,) = (
            shape
            for name, shape in tf.train.load_checkpoint(path).get_variable_to_shape_map().items()
            if name.startswith("values/")
        )
        assert shape == [2 if is_chief else 0, 2, 3]


def test_a_checkpoint_may_be_written_by_a_thread(tmp_path):
    where, values = make(2)
    assign_each(where, values)
    saved = values.numpy()
    checkpoint = tf.train.Checkpoint(values=values)
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    path = checkpoint.write(str(tmp_path / "ckpt"), options)
    values.assign(np.zeros_like(saved))  # after the copy was made
    checkpoint.sync()
    _, restored = make(2)
    tf.train.Checkpoint(values=restored).read(path).assert_existing_objects_matched()
    assert np.array_equal(restored.numpy(), saved)
