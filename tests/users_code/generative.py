"""Generative models: variational autoencoders, diffusion, and two adversarial networks."""

import math

import tensorflow as tf
import tf_keras

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


def divergence(z_mean, z_log_var):
    return -0.5 * tf.reduce_sum(1 + z_log_var - z_mean**2 - tf.exp(z_log_var), axis=1)


class VariationalAutoencoder(Case):
    features = ("x",)
    sampling = Sampling

    def build_model(self):
        x = tf_keras.Input((6,))
        hidden = layers.Dense(4, activation="relu")(x)
        z_mean, z_log_var = layers.Dense(2)(hidden), layers.Dense(2)(hidden)
        z = self.sampling()([z_mean, z_log_var])
        return tf_keras.Model(x, [layers.Dense(6)(z), z_mean, z_log_var])

    def per_example_loss(self, batch, outputs):
        reconstruction, z_mean, z_log_var = outputs
        error = tf.reduce_sum((batch["x"] - reconstruction) ** 2, axis=1)
        return error + divergence(z_mean, z_log_var)


class DivergenceLayer(layers.Layer):
    """Adds the divergence, a mean over the batch, to the losses of the model."""

    def call(self, inputs):
        self.add_loss(tf.reduce_mean(divergence(*inputs)))
        return inputs[0]


class AddLossAutoencoder(VariationalAutoencoder):
    """Without noise (z is the mean), so that only add_loss is in question."""

    def build_model(self):
        x = tf_keras.Input((6,))
        hidden = layers.Dense(4, activation="relu")(x)
        z_mean, z_log_var = layers.Dense(2)(hidden), layers.Dense(2)(hidden)
        return tf_keras.Model(x, layers.Dense(6)(DivergenceLayer()([z_mean, z_log_var])))

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum((batch["x"] - outputs) ** 2, axis=1)


class FunctionalAddLoss(AddLossAutoencoder):
    """`model.add_loss(tensor)` of a functional model, as older tutorials write it."""

    def build_model(self):
        x = tf_keras.Input((6,))
        hidden = layers.Dense(4, activation="relu")(x)
        z_mean, z_log_var = layers.Dense(2)(hidden), layers.Dense(2)(hidden)
        model = tf_keras.Model(x, layers.Dense(6)(z_mean))
        model.add_loss(tf_keras.backend.mean(divergence(z_mean, z_log_var)))
        return model


class DivergenceByRow(VariationalAutoencoder):
    """The same model with the divergence in the loss of the row."""

    class Mean(layers.Layer):
        def call(self, inputs):
            return inputs[0]

    sampling = Mean


class VectorQuantizer(layers.Layer):
    """The nearest code of each vector, with a straight-through gradient (Keras: VQ-VAE)."""

    def __init__(self, codes=5, width=3, add=True):
        super().__init__()
        self.codes, self.width, self.add = codes, width, add

    def build(self, input_shape):
        self.table = self.add_weight("table", (self.width, self.codes), initializer="uniform")

    def call(self, x):
        flat = tf.reshape(x, [-1, self.width])
        distances = (
            tf.reduce_sum(flat**2, axis=1, keepdims=True)
            - 2 * tf.matmul(flat, self.table)
            + tf.reduce_sum(self.table**2, axis=0)
        )
        index = tf.argmin(distances, axis=1)
        quantized = tf.reshape(tf.gather(tf.transpose(self.table), index), tf.shape(x))
        commitment = (tf.stop_gradient(quantized) - x) ** 2
        codebook = (quantized - tf.stop_gradient(x)) ** 2
        if self.add:
            self.add_loss(0.25 * tf.reduce_mean(commitment) + tf.reduce_mean(codebook))
        losses = tf.reduce_mean(0.25 * commitment + codebook, axis=[1, 2, 3])
        return x + tf.stop_gradient(quantized - x), losses


class QuantizedAutoencoder(Case):
    features = ("image",)
    add = True

    def build_model(self):
        image = tf_keras.Input((6, 6, 3))
        encoded = layers.Conv2D(3, 3, strides=2, padding="same")(image)
        quantized, losses = VectorQuantizer(add=self.add)(encoded)
        decoded = layers.Conv2DTranspose(3, 3, strides=2, padding="same")(quantized)
        return tf_keras.Model(image, [decoded, losses])

    def per_example_loss(self, batch, outputs):
        losses = tf.reduce_mean((batch["image"] - outputs[0]) ** 2, axis=[1, 2, 3])
        return losses if self.add else losses + outputs[1]


class QuantizedByRow(QuantizedAutoencoder):
    add = False


class Diffusion(Case):
    """A random time and random noise for each row; the network predicts the noise (Keras: DDIM)."""

    features = ("x",)

    def build_model(self):
        return tf_keras.Sequential([layers.Dense(5, activation="swish"), layers.Dense(6)])

    def draw(self, x):
        count = tf.shape(x)[0]
        return tf.random.uniform([count, 1], dtype=x.dtype), tf.random.normal(
            tf.shape(x), dtype=x.dtype
        )

    def forward(self, batch, training):
        times, noise = self.draw(batch["x"])
        angles = 0.2 + times * (math.pi / 2 - 0.4)
        noisy = tf.cos(angles) * batch["x"] + tf.sin(angles) * noise
        return noise, self.model(tf.concat([noisy, tf.sin(angles) ** 2], axis=1), training=training)

    def per_example_loss(self, batch, outputs):
        noise, predicted = outputs
        return tf.reduce_mean(tf.abs(noise - predicted), axis=1)


class DiscreteDiffusion(Diffusion):
    """Integer time steps, as in DDPM."""

    def draw(self, x):
        steps = tf.random.uniform([tf.shape(x)[0]], 0, 100, tf.int64)
        return tf.cast(steps, x.dtype)[:, None] / 100, tf.random.normal(tf.shape(x), dtype=x.dtype)


class FixedBatchDiffusion(Diffusion):
    """Draws for a constant batch size, as Keras' example does."""

    def draw(self, x):
        return tf.random.uniform([7, 1], dtype=x.dtype), tf.random.normal([7, 6], dtype=x.dtype)


class AdversarialNetworks(Case):
    """A generator and a discriminator with smoothed labels (Keras: DCGAN, one optimizer each)."""

    features = ("x",)

    def build_model(self):
        hidden = layers.Dense(5, activation="tanh")
        self.discriminator = tf_keras.Sequential([hidden, layers.Dense(1)])
        self.discriminator.build((None, 6))
        self.discriminator_optimizer = tf_keras.optimizers.SGD(0.05)
        return tf_keras.Sequential([layers.Dense(5, activation="tanh"), layers.Dense(6)])

    def forward(self, batch, training):
        return self.model(self.draw_noise(batch["x"]), training=training)

    def draw_noise(self, x):
        return tf.random.normal([tf.shape(x)[0], 3], dtype=x.dtype)

    def draw_smoothing(self, logits):
        return tf.random.uniform(tf.shape(logits), dtype=logits.dtype)

    def binary(self, label, logits):
        return tf.nn.sigmoid_cross_entropy_with_logits(label, logits)[:, 0]

    def discriminator_losses(self, batch):
        real = self.discriminator(batch["x"], training=True)
        fakes = self.model(self.draw_noise(batch["x"]), training=True)
        fake = self.discriminator(fakes, training=True)
        ones = tf.ones_like(real) - 0.05 * self.draw_smoothing(real)
        zeros = 0.05 * self.draw_smoothing(fake)
        return self.binary(ones, real) + self.binary(zeros, fake)

    def generator_losses(self, batch):
        fakes = self.model(self.draw_noise(batch["x"]), training=True)
        fake = self.discriminator(fakes, training=True)
        return self.binary(tf.ones_like(fake), fake)

    def replica_step(self, batch):
        self.minimize(
            batch,
            self.discriminator_losses,
            variables=self.discriminator.trainable_variables,
            optimizer=self.discriminator_optimizer,
        )
        return self.minimize(batch, self.generator_losses)


class GradientPenalty(AdversarialNetworks):
    """The critic's gradient at random points between real and generated rows (Keras: WGAN-GP)."""

    def draw_point(self, x):
        return tf.random.uniform([tf.shape(x)[0], 1], dtype=x.dtype)

    def discriminator_losses(self, batch):
        real, fakes = batch["x"], self.model(self.draw_noise(batch["x"]), training=True)
        between = real + self.draw_point(real) * (fakes - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.discriminator(between, training=True)
        norms = tf.sqrt(tf.reduce_sum(tape.gradient(score, between) ** 2, axis=1))
        scores = self.discriminator(fakes) - self.discriminator(real)
        return scores[:, 0] + 10 * (norms - 1) ** 2

    def generator_losses(self, batch):
        return -self.discriminator(self.model(self.draw_noise(batch["x"])))[:, 0]


class RealGradientPenalty(Case):
    """R1: the gradient at the real rows only, without noise."""

    def per_example_loss(self, batch, outputs):
        with tf.GradientTape() as tape:
            tape.watch(batch["x"])
            score = tf.reduce_logsumexp(self.model(batch["x"], training=True), axis=1)
        norms = tf.reduce_sum(tape.gradient(score, batch["x"]) ** 2, axis=1)
        return super().per_example_loss(batch, outputs) + 5 * norms
