"""The random numbers of a row do not depend on the replica that computes it."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras.src.engine.base_layer import BaseRandomLayer

import ctl
from ctl.keras.dropout import key_random_layers
from ctl.replica import examples

LAYERS = {
    "dropout": lambda: tf_keras.layers.Dropout(0.4),
    "spatial": lambda: tf_keras.layers.SpatialDropout1D(0.4),
    "gaussian noise": lambda: tf_keras.layers.GaussianNoise(1.0),
    "gaussian dropout": lambda: tf_keras.layers.GaussianDropout(0.4),
    "alpha dropout": lambda: tf_keras.layers.AlphaDropout(0.4),
}
ROWS = 7
# The elements that two layers keep, drawn by the first version of ctl.
EXISTING = [
    "110100010110111011100100011100",
    "101100111101111110110011110011",
]


@functools.cache
def model_of(make, seed=0):
    tf_keras.utils.set_random_seed(0)
    model = tf_keras.Sequential([tf_keras.layers.InputLayer([5, 3]), make()])
    key_random_layers(model, seed)
    return model


@functools.cache
def trace(model, jit=False):
    def call(x, first_row, step):  # as arguments: XLA folds constants by TensorFlow's kernels
        with examples(first_row=first_row, step=step):
            return model(x, training=True)

    return tf.function(call, jit_compile=jit)


def outputs(model, start, end, step=0, jit=False):
    """The model's training outputs for rows start..end of a global batch of ones."""
    first_row, step = tf.constant(start, tf.int64), tf.constant(step, tf.int64)
    return trace(model, jit)(tf.ones([end - start, 5, 3]), first_row, step).numpy()


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_of_a_replica_are_its_slice_of_those_of_the_global_batch(name):
    model = model_of(LAYERS[name])
    expected = outputs(model, 0, ROWS)
    for cuts in ([0, 4, 7], range(8)):
        parts = [outputs(model, a, b) for a, b in itertools.pairwise(cuts)]
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=1e-6)
    assert len({row.tobytes() for row in expected}) > 1, "equal rows show nothing"


@pytest.mark.parametrize("name", ["dropout", "gaussian noise", "alpha dropout"])
def test_numbers_depend_on_step_and_seed_alone(name):
    model = model_of(LAYERS[name])
    first, second = outputs(model, 0, ROWS, step=1), outputs(model, 0, ROWS, step=2)
    assert not np.array_equal(first, second)
    assert np.array_equal(outputs(model, 0, ROWS, step=1), first)
    assert not np.array_equal(outputs(model_of(LAYERS[name], seed=1), 0, ROWS, step=1), first)


@pytest.mark.parametrize("name", ["dropout", "gaussian noise", "gaussian dropout"])
def test_xla_draws_the_same_numbers(name):
    plain, compiled = (outputs(model_of(LAYERS[name]), 3, 7, 9, jit) for jit in (False, True))
    np.testing.assert_allclose(compiled, plain, rtol=0, atol=1e-5)


def test_two_layers_and_two_calls_of_a_layer_draw_different_numbers():
    layer = tf_keras.layers.Dropout(0.5)
    inputs = tf_keras.Input([64])
    outputs = [layer(inputs), layer(inputs), tf_keras.layers.Dropout(0.5)(inputs)]
    model = tf_keras.Model(inputs, outputs)
    key_random_layers(model, 0)
    with examples():
        masks = [m.numpy().tobytes() for m in model(tf.ones([4, 64]), training=True)]
    assert len(set(masks)) == 3


def test_dropout_drops_at_its_rate_and_scales_the_rest():
    model = model_of(LAYERS["dropout"])
    with examples():
        dropped = model(tf.ones([4000, 5, 3]), training=True).numpy()
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.6)}
    # 60,000 draws: the mean's standard deviation is 0.0033.
    assert dropped.mean() == pytest.approx(1.0, abs=0.015)


def test_normal_noise_has_mean_0_and_deviation_1():
    model = model_of(LAYERS["gaussian noise"])
    with examples():
        noise = model(tf.zeros([4000, 5, 3]), training=True).numpy()
    assert noise.mean() == pytest.approx(0.0, abs=0.02)
    assert noise.std() == pytest.approx(1.0, abs=0.02)


def test_noise_shared_by_all_rows_is_shared_by_all_replicas():
    model = model_of(lambda: tf_keras.layers.Dropout(0.5, noise_shape=[1, 5, 3]))
    one, other = outputs(model, 0, 3), outputs(model, 3, 7)
    assert np.array_equal(one[0], other[0]) and np.array_equal(one[0], one[2])


def test_bits_are_those_that_existing_checkpoints_rely_on():
    model = tf_keras.Sequential(
        [tf_keras.layers.Dropout(0.4), tf_keras.layers.Dropout(0.3, seed=7)]
    )
    model.build([None, 5, 3])
    key_random_layers(model, 3)
    with examples(first_row=2, step=9):
        masks = [layer(tf.ones([2, 5, 3]), training=True).numpy() > 0 for layer in model.layers]
    shown = ["".join(str(int(kept)) for kept in mask.ravel()) for mask in masks]
    assert shown == EXISTING


def test_layer_draws_as_in_tf_keras_outside_of_a_step():
    model = model_of(LAYERS["dropout"])
    drawn = [model(tf.ones([8, 5, 3]), training=True).numpy().tobytes() for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_layer_that_draws_for_its_complete_batch_is_rejected_by_name():
    class ForBatch(BaseRandomLayer):
        def call(self, x):
            return x + tf.random.stateless_uniform(
                [], self._random_generator.make_seed_for_stateless_op()
            )

    # RandomHeight draws one number for all images.
    for layer in (ForBatch(force_generator=True), tf_keras.layers.RandomHeight(0.1)):
        model = tf_keras.Sequential([layer])
        key_random_layers(model, 0)
        with examples(), pytest.raises(ctl.UsageError, match=f"Layer {layer.name} draws"):
            model(tf.ones([2, 8, 8, 3]), training=True)


def test_keying_adds_nothing_to_weights_or_checkpoint(tmp_path):
    model = model_of(LAYERS["dropout"])
    assert model.variables == []
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not [name for name in names if "random" in name or "generator" in name]
