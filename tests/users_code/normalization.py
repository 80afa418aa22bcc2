"""Layers that normalize weights or rows, that draw weights, and that add losses of activations."""

import tensorflow as tf
import tf_keras

import ctl
from tests.users_code.examples import CLASSES, Case, convolutional, dense

layers = tf_keras.layers


class SpectralDense(layers.Layer):
    """Divides its kernel by its largest singular value, by one power iteration in each call."""

    def build(self, input_shape):
        self.w = self.add_weight("w", (int(input_shape[-1]), 4))
        self.u = self.add_weight("u", (1, 4), trainable=False)

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
        self.v = self.add_weight("v", (int(input_shape[-1]), self.units))
        self.g = self.add_weight("g", (self.units,), initializer="ones")
        self.ready = self.add_weight("ready", (), initializer="zeros", trainable=False)

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
    data_init = False

    def build_model(self):
        return tf_keras.Sequential([WeightNormalization(4, self.data_init), layers.Dense(CLASSES)])


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


class GhostBatchNormalization(layers.Layer):
    """Normalizes groups of rows by their own statistics."""

    def call(self, x, training=None):
        half = tf.shape(x)[0] // 2
        normalized = []
        for group in (x[:half], x[half:]):
            mean, variance = tf.nn.moments(group, axes=[0])
            normalized.append((group - mean) * tf.math.rsqrt(variance + 1e-3))
        return tf.concat(normalized, axis=0)


class GhostBatchNormalizationCase(Case):
    def build_model(self):
        return dense(GhostBatchNormalization())


class SecondModelNormalization(Case):
    """Plain batch normalization in a second model, a projection head."""

    def build_model(self):
        self.head = tf_keras.Sequential([layers.BatchNormalization(), layers.Dense(CLASSES)])
        return super().build_model()

    def forward(self, batch, training):
        return self.head(self.model(batch["x"], training=training), training=training)


class BayesianDense(layers.Layer):
    """Weights drawn for each batch, and their divergence as a loss (Bayes by backprop)."""

    def build(self, input_shape):
        shape = (int(input_shape[-1]), 4)
        self.mean = self.add_weight("mean", shape)
        self.log_deviation = self.add_weight("log_deviation", shape, initializer="zeros")

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


class Flipout(BayesianDense):
    """One perturbation of the weights for the batch, and random signs for each row (Wen et al.)."""

    def draw_sign(self, x, units):
        shape = [tf.shape(x)[0], units]
        return tf.cast(2 * tf.random.uniform(shape, 0, 2, tf.int32) - 1, x.dtype)

    def call(self, x):
        deviation = tf.nn.softplus(self.log_deviation)
        noise = deviation * self.draw(deviation.shape, x.dtype)
        one, two = self.draw_sign(x, x.shape[1]), self.draw_sign(x, 4)
        return tf.matmul(x, self.mean) + tf.matmul(x * one, noise) * two


class FlipoutCase(Case):
    def build_model(self):
        return dense(Flipout())


class SwitchRouter(layers.Layer):
    """Experts with a loss that balances their load over the batch (Keras: switch transformer)."""

    def __init__(self, add=True):
        super().__init__()
        self.add = add

    def build(self, input_shape):
        width = int(input_shape[-1])
        self.route = self.add_weight("route", (width, 3))
        self.experts = self.add_weight("experts", (3, width, 4))

    def call(self, x, training=None):
        probability = tf.nn.softmax(tf.matmul(x, self.route))
        chosen = tf.one_hot(tf.argmax(probability, axis=1), 3, dtype=x.dtype)
        outputs = tf.einsum("bi,eio,be->bo", x, self.experts, chosen * probability)
        if not self.add:
            return outputs, chosen, probability
        load = tf.reduce_mean(chosen, axis=0) * tf.reduce_mean(probability, axis=0)
        self.add_loss(0.3 * tf.reduce_sum(load))
        return outputs


class SwitchCase(Case):
    def build_model(self):
        return dense(SwitchRouter())


class OrthogonalRegularizer(tf_keras.regularizers.Regularizer):
    """A penalty on the activations of each row (Keras: PointNet)."""

    def __call__(self, x):
        matrix = tf.reshape(x, [-1, 2, 2])
        square = tf.matmul(matrix, matrix, transpose_b=True)
        return tf.reduce_sum(0.1 * (square - tf.eye(2, dtype=x.dtype)) ** 2)


class OrthogonalCase(Case):
    def build_model(self):
        return dense(layers.Dense(4, activity_regularizer=OrthogonalRegularizer()))
