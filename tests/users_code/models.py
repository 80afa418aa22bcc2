"""Models of public examples in which a row is computed from itself in an unusual way."""

import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, TOKENS, WORDS, Case

layers = tf_keras.layers


class FourierMixing(Case):
    """Fourier transforms over tokens and features, in complex numbers."""

    features = ("series", "label")

    def forward(self, batch, training):
        series = tf.cast(batch["series"], tf.complex128)
        mixed = tf.cast(tf.signal.fft2d(series), tf.float64)
        return self.model(tf.reduce_mean(mixed, axis=1), training=training)


class VolumeRendering(Case):
    """Colors along a ray, weighted by the light that reaches each of its points."""

    features = ("series", "label")

    def forward(self, batch, training):
        angles = batch["series"][..., None] * tf.constant([1.0, 2.0, 4.0], tf.float64)
        points = tf.reshape(tf.concat([tf.sin(angles), tf.cos(angles)], -1), [-1, TOKENS, 24])
        density = tf.nn.softplus(points[..., 0])
        passed = tf.math.cumprod(tf.exp(-density), axis=1, exclusive=True)
        weights = (1 - tf.exp(-density)) * passed
        return tf.einsum("bp,bpc->bc", weights, self.model(points, training=training))


class Perceiver(Case):
    """Cross attention from latent vectors, which are weights, to the tokens of a row."""

    features = ("series", "label")

    def build_model(self):
        return LatentAttention()


class LatentAttention(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3)
        self.dense = layers.Dense(CLASSES)

    def build(self, shape):
        self.latents = self.add_weight(name="latents", shape=[3, 4])

    def call(self, series):
        latents = tf.repeat(self.latents[None], tf.shape(series)[0], axis=0)
        attended = self.attention(latents, series)
        return self.dense(layers.Flatten()(attended))


class LastOutput(Case):
    """The last output of each sequence, by its place among those of all rows."""

    features = ("tokens", "length", "label")

    def build_model(self):
        recurrent = layers.GRU(CLASSES, return_sequences=True)
        return tf_keras.Sequential([layers.Embedding(WORDS, 3), recurrent])

    def forward(self, batch, training):
        outputs = tf.reshape(self.model(batch["tokens"], training=training), [-1, CLASSES])
        first = tf.range(tf.size(batch["length"])) * TOKENS
        return tf.gather(outputs, first + batch["length"] - 1)


class Molecules(Case):
    """The molecules of a batch as one graph, with the atoms of all of them in one list."""

    features = ("series", "length", "pairs", "label")

    def forward(self, batch, training):
        count = batch["length"]
        atoms = tf.boolean_mask(batch["series"], tf.sequence_mask(count, TOKENS))
        first = tf.cast(tf.cumsum(count, exclusive=True), tf.int64)
        bonds = tf.reshape(batch["pairs"] + first[:, None, None], [-1, 2])
        states = self.model(atoms, training=training)
        messages = tf.gather(states, bonds[:, 0])
        sums = tf.math.unsorted_segment_sum(messages, bonds[:, 1], tf.shape(atoms)[0])
        molecules = tf.repeat(tf.range(tf.size(count)), count)
        return tf.math.unsorted_segment_mean(states + tf.tanh(sums), molecules, tf.size(count))
