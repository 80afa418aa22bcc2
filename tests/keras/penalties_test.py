"""Penalties that layers add as functions in `call`."""

import inspect

import tensorflow as tf
import tf_keras

import ctl


class Penalized(tf_keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight("scale", shape[-1:], initializer="ones")

    def call(self, inputs):
        self.add_loss(lambda: tf.reduce_sum(self.scale**2))
        return inputs * self.scale


def test_penalty_of_a_model_that_is_older_than_the_step_counts_once(monkeypatch):
    """SGD of the penalty alone, whose gradient is 2: the weights become 1 - 0.1 * 2."""
    layer = tf_keras.layers.Layer
    with monkeypatch.context() as context:
        context.setattr(layer, "add_loss", inspect.unwrap(layer.add_loss))
        inputs = tf_keras.Input([3])
        model = tf_keras.Model(inputs, Penalized()(inputs))
    step = ctl.Step(
        model,
        tf_keras.optimizers.SGD(0.1),
        lambda batch, outputs: 0.0 * tf.reduce_sum(outputs, axis=1),
        global_batch_size=2,
    )
    step({"x": tf.ones([2, 3])})
    tf.debugging.assert_near(model.get_weights()[0], [0.8, 0.8, 0.8])


class PenalizedInBuild(tf_keras.layers.Dense):
    """Adds the penalty after Dense.build, which marks the layer as built."""

    def build(self, shape):
        super().build(shape)
        self.add_loss(lambda: tf.reduce_sum(self.kernel**2))


def test_penalty_that_build_adds_last_counts():
    """SGD of the penalty alone, as above, in a model that the first call builds."""
    layer = PenalizedInBuild(1, use_bias=False, kernel_initializer="ones")
    step = ctl.Step(
        lambda: tf_keras.Sequential([layer]),
        tf_keras.optimizers.SGD(0.1),
        lambda batch, outputs: 0.0 * tf.reduce_sum(outputs, axis=1),
        global_batch_size=2,
    )
    for _ in range(2):
        step({"x": tf.ones([2, 3])})
    tf.debugging.assert_near(layer.kernel, [[0.64]] * 3)
