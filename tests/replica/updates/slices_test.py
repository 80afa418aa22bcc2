"""Every element is in the slice of one replica, or of all; slices give the same bits again."""

import numpy as np
import pytest
import tensorflow as tf

from ctl.replica.updates.slices import SliceLayout


@pytest.mark.parametrize("shape", [(), (3,), (16,), (5, 7), (64,), (70,), (33, 31), (0, 4)])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
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


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_rows_of_a_sparse_gradient_are_those_of_the_dense_one(replicas):
    layout = SliceLayout((11, 7), replicas)
    values = np.random.default_rng(0).normal(size=(3, 7))
    sparse = tf.IndexedSlices(tf.constant(values), tf.constant([9, 0, 10]), tf.constant([11, 7]))
    dense = tf.convert_to_tensor(sparse)
    for replica in range(replicas):
        result = layout.cut_rows(sparse, tf.constant(replica))
        np.testing.assert_array_equal(tf.convert_to_tensor(result), layout.cut(dense, replica))
        assert len(set(result.indices.numpy())) == len(result.indices)
