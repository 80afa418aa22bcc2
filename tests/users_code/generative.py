"""Generative models: variational autoencoders, diffusion, and two adversarial networks."""

import tensorflow as tf
import tf_keras

import ctl
from tests.users_code.examples import Case

layers = tf_keras.layers


class Sampling(layers.Layer):
    """z = mean + deviation * noise (Keras: variational autoencoder)."""

    def draw(self, z_mean):
        shape = (tf.shape(z_mean)[0], tf.shape(z_mean)[1])
        return tf_keras.backend.random_normal(shape=shape, dtype=z_mean.dtype)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        return z_mean + tf.exp(0.5 * z_log_var) * self.draw(z_mean)


def encode():
    """The input, and the mean and the logarithm of the variance that it is encoded by."""
    x = tf_keras.Input((6,))
    hidden = layers.Dense(4, activation="relu")(x)
    return x, layers.Dense(2)(hidden), layers.Dense(2)(hidden)


def squared_error(x, reconstruction):
    return tf.reduce_sum((x - reconstruction) ** 2, axis=1)


def divergence(z_mean, z_log_var):
    return -0.5 * tf.reduce_sum(1 + z_log_var - z_mean**2 - tf.exp(z_log_var), axis=1)


class VariationalAutoencoder(Case):
    features = ("x",)
    sampling = Sampling

    def build_model(self):
        x, z_mean, z_log_var = encode()
        z = self.sampling()([z_mean, z_log_var])
        return tf_keras.Model(x, [layers.Dense(6)(z), z_mean, z_log_var])

    def per_example_loss(self, batch, outputs):
        reconstruction, z_mean, z_log_var = outputs
        return squared_error(batch["x"], reconstruction) + divergence(z_mean, z_log_var)


class DivergenceLayer(layers.Layer):
    """Adds the divergence, a mean over the batch, to the losses of the model."""

    def call(self, inputs):
        self.add_loss(tf.reduce_mean(divergence(*inputs)))
        return inputs[0]


class AddLossAutoencoder(VariationalAutoencoder):
    """Without noise (z is the mean), so that only add_loss is in question."""

    def build_model(self):
        x, z_mean, z_log_var = encode()
        return tf_keras.Model(x, layers.Dense(6)(DivergenceLayer()([z_mean, z_log_var])))

    def per_example_loss(self, batch, outputs):
        return squared_error(batch["x"], outputs)


class ImportanceWeighted(VariationalAutoencoder):
    """The mean over three samples of each row, which stand one after another (Burda et al.)."""

    def build_model(self):
        x = tf_keras.Input((6,))
        return tf_keras.Model(x, [layers.Dense(6)(x), layers.Dense(6)(x)])

    def per_example_loss(self, batch, outputs):
        noise = ctl.random.normal([None, 3, 6], dtype=tf.float64)
        noise = tf.reshape(tf.transpose(noise, [1, 0, 2]), [-1, 6])
        mean, log_var, x = (tf.tile(values, [3, 1]) for values in (*outputs, batch["x"]))
        z = mean + tf.exp(0.5 * log_var) * noise
        logs = tf.reduce_sum(noise**2 + log_var - z**2 - (z - x) ** 2, axis=1)
        logs = tf.reshape(logs, [3, tf.shape(batch["x"])[0]])
        largest = tf.reduce_max(logs)
        return -largest - tf.math.log(tf.reduce_mean(tf.exp(logs - largest), axis=0))
