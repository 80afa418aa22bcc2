"""Layers that normalize weights or rows, that draw weights, and that add losses of activations."""

import tensorflow as tf
import tf_keras

import ctl
from tests.users_code.examples import CLASSES, Case, convolutional, dense

layers = tf_keras.layers


class SpectralDense(layers.Layer):
    """Divides its kernel by its largest singular value, by one power iteration in each call."""

    def build(self, input_shape):
        self.w = self.add_weight(name="w", shape=(int(input_shape[-1]), 4))
        self.u = self.add_weight(name="u", shape=(1, 4), trainable=False)

    def call(self, x, training=None):
        v = tf.math.l2_normalize(tf.matmul(self.u, self.w, transpose_b=True))
        u = tf.math.l2_normalize(tf.matmul(v, self.w))
        sigma = tf.matmul(tf.matmul(v, self.w), u, transpose_b=True)
        if training:
            self.u.assign(u)
        return tf.matmul(x, self.w / sigma)


class SpectralNormalization(Case):
    def build_model(self):
        return dense(SpectralDense())


class WeightNormalization(layers.Layer):
    """A dense layer with separate norm and direction of its kernel."""

    def __init__(self, units, data_init=False):
        super().__init__()
        self.units, self.data_init = units, data_init

    def build(self, input_shape):
        self.v = self.add_weight(name="v", shape=(int(input_shape[-1]), self.units))
        self.g = self.add_weight(name="g", shape=(self.units,), initializer="ones")
        self.ready = self.add_weight(name="ready", shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        y = tf.matmul(x, tf.math.l2_normalize(self.v, axis=0))
        if self.data_init:  # the first batch scales its outputs to variance 1
            scale = tf.math.rsqrt(self.variance(y) + 1e-10)
            self.g.assign(tf.where(self.ready > 0, self.g, scale))
            self.ready.assign(tf.ones_like(self.ready))
        return y * self.g

    def variance(self, y):
        return tf.math.reduce_variance(y, axis=0)


class WeightNormalizationCase(Case):
    layer, data_init = WeightNormalization, False

    def build_model(self):
        return tf_keras.Sequential([self.layer(4, self.data_init), layers.Dense(CLASSES)])


class DataDependentInitialization(WeightNormalizationCase):
    data_init = True


class SyncBatchNormalization(Case):
    features = ("image", "label")

    def build_model(self):
        return convolutional(ctl.SyncBatchNormalization())


class PlainBatchNormalization(Case):
    features = ("image", "label")

    def build_model(self):
        return convolutional(layers.BatchNormalization())


class BayesianDense(layers.Layer):
    """Weights drawn for each batch, and their divergence as a loss (Bayes by backprop)."""

    def build(self, input_shape):
        shape = (int(input_shape[-1]), 4)
        self.mean = self.add_weight(name="mean", shape=shape)
        self.log_deviation = self.add_weight(name="log_deviation", shape=shape, initializer="zeros")

    def draw(self, shape, dtype):
        return tf.random.normal(shape, dtype=dtype)

    def call(self, x):
        deviation = tf.nn.softplus(self.log_deviation)
        divergence = deviation**2 + self.mean**2 - 1 - 2 * tf.math.log(deviation)
        self.add_loss(0.01 * tf.reduce_sum(divergence) / 2)
        return tf.matmul(x, self.mean + deviation * self.draw(deviation.shape, x.dtype))


class BayesianCase(Case):
    def build_model(self):
        return dense(BayesianDense())
