"""Values of each replica in a checkpoint: the same bits on as many replicas, the same sum on others."""

import numpy as np
import pytest
import tensorflow as tf

from ctl import testing
from ctl.parts.replica_values import ReplicaValues, SliceLayout


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


@pytest.mark.parametrize("replicas", [1, 4])
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


# Slices.


@pytest.mark.parametrize("shape", [(), (3,), (16,), (5, 7), (64,), (70,), (33, 31), (0, 4)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_slices_give_the_same_bits_again(shape, replicas):
    draw = np.random.default_rng(0)
    value = draw.normal(size=shape).astype(np.float32)
    value.reshape(-1)[::5] = -0.0
    value.reshape(-1)[3::7] = np.nan
    layout = SliceLayout(shape, replicas)
    slices = [layout.cut(tf.constant(value), replica).numpy() for replica in range(replicas)]
    assert {len(each) for each in slices} == {layout.length}
    bodies = tf.stack([each[: layout.body] for each in slices])
    joined = layout.join(bodies, slices[-1][layout.body :])
    assert joined.numpy().tobytes() == value.tobytes() and joined.shape == shape


def test_complete_vectors_are_split_and_the_rest_is_on_every_replica():
    layout = SliceLayout((70,), 2)
    first, second = (layout.cut(tf.range(70), tf.constant(r)).numpy() for r in range(2))
    rest = [*range(64, 70)]
    assert first.tolist() == [*range(32), *rest]
    assert second.tolist() == [*range(32, 64), *rest]
    # 64 elements are 4 vectors: 3 replicas have 2, 2 and none.
    assert SliceLayout((70,), 3).cut(tf.range(70), 2).numpy().tolist() == [0] * 32 + rest


def test_slices_of_large_variables_are_hardly_larger_than_their_share():
    # The matrices and vectors of a Transformer layer of width 256, and an embedding of 10,000 rows.
    shapes = [(256, 768), (768,), (256, 256), (256,), (256, 1024), (1024,), (10_000, 256)]
    total = sum(np.prod(shape) for shape in shapes)
    for replicas in (2, 4, 8):
        lengths = sum(SliceLayout(shape, replicas).length for shape in shapes)
        assert total / replicas <= lengths <= 1.01 * total / replicas


def test_rows_of_a_sparse_gradient_are_those_of_the_dense_one():
    replicas = 4
    layout = SliceLayout((11, 7), replicas)
    values = np.random.default_rng(0).normal(size=(3, 7))
    sparse = tf.IndexedSlices(tf.constant(values), tf.constant([9, 0, 10]), tf.constant([11, 7]))
    dense = tf.convert_to_tensor(sparse)
    for replica in range(replicas):
        result = layout.cut_rows(sparse, tf.constant(replica))
        np.testing.assert_array_equal(tf.convert_to_tensor(result), layout.cut(dense, replica))
        assert len(set(result.indices.numpy())) == len(result.indices)
