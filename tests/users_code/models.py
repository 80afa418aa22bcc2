"""Models of public examples in which a row is computed from itself in an unusual way."""

import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, TOKENS, WORDS, Case

layers = tf_keras.layers


class AttentionPooling(Case):
    """Attention over the instances of a bag, which is one row."""

    features = ("series", "label")

    def build_model(self):
        series = tf_keras.Input([TOKENS, 4])
        scores = layers.Dense(1)(layers.Dense(3, "tanh")(series))
        weights = layers.Softmax(axis=1)(scores)
        pooled = layers.Lambda(lambda x: tf.reduce_sum(x[0] * x[1], axis=1))([weights, series])
        return tf_keras.Model(series, layers.Dense(CLASSES)(pooled))


class FourierMixing(Case):
    """Fourier transforms over tokens and features, in complex numbers."""

    features = ("series", "label")

    def forward(self, batch, training):
        series = tf.cast(batch["series"], tf.complex128)
        mixed = tf.cast(tf.signal.fft2d(series), tf.float64)
        return self.model(tf.reduce_mean(mixed, axis=1), training=training)


class Crossing(Case):
    """A cross network: x0 * (W x + b) + x."""

    def build_model(self):
        x0 = x = tf_keras.Input([6])
        for _ in range(2):
            x = x0 * layers.Dense(6)(x) + x
        return tf_keras.Model(x0, layers.Dense(CLASSES)(x))


@tf.custom_gradient
def reverse(x):
    return tf.identity(x), lambda gradient: -gradient


class GradientReversal(Case):
    """A domain classifier whose gradient is reversed in the features."""

    features = ("x", "view", "label")

    def build_model(self):
        x = tf_keras.Input([6])
        hidden = layers.Dense(4, "tanh")(x)
        domain = layers.Dense(1)(layers.Lambda(reverse)(hidden))
        return tf_keras.Model(x, [layers.Dense(CLASSES)(hidden), domain])

    def forward(self, batch, training):
        return self.model(batch["x"]), self.model(batch["view"])

    def per_example_loss(self, batch, outputs):
        (logits, source), (_, target) = outputs
        domain = tf.nn.softplus(-source[:, 0]) + tf.nn.softplus(target[:, 0])
        return super().per_example_loss(batch, logits) + 0.1 * domain


class QuotientRemainder(Case):
    """The embedding of a word is the product of two smaller ones."""

    features = ("tokens", "label")

    def build_model(self):
        tokens = tf_keras.Input([TOKENS], dtype="int32")
        quotient = layers.Embedding(WORDS // 3 + 1, 4)(tokens // 3)
        remainder = layers.Embedding(3, 4)(tokens % 3)
        pooled = layers.GlobalAveragePooling1D()(quotient * remainder)
        return tf_keras.Model(tokens, layers.Dense(CLASSES)(pooled))


class MixtureOfExperts(Case):
    """Experts that are mixed by the gate of each row."""

    def build_model(self):
        x = tf_keras.Input([6])
        gate = layers.Softmax()(layers.Dense(2)(x))
        experts = layers.Lambda(lambda y: tf.stack(y, axis=1))(
            [layers.Dense(4, "tanh")(x) for _ in range(2)]
        )
        mixed = layers.Lambda(lambda y: tf.einsum("be,bef->bf", y[0], y[1]))([gate, experts])
        return tf_keras.Model(x, layers.Dense(CLASSES)(mixed))


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


class ConnectionistTemporal(Case):
    """CTC over the steps of a series, as in the example on captchas."""

    features = ("series", "target", "length")

    def build_model(self):
        return tf_keras.Sequential([layers.Dense(WORDS + 1, activation="softmax")])

    def forward(self, batch, training):
        return self.model(tf.repeat(batch["series"], 3, axis=1), training=training)

    def per_example_loss(self, batch, outputs):
        steps = 3 * TOKENS * tf.ones_like(batch["length"])
        lengths = tf.clip_by_value(batch["length"], 1, 3)
        logits = tf.math.log(tf.cast(outputs, tf.float32) + 1e-7)
        losses = tf.nn.ctc_loss(
            batch["target"], logits, lengths, steps, logits_time_major=False, blank_index=WORDS
        )
        return tf.cast(losses, tf.float64)


class Triplets(Case):
    """A siamese network with a margin between the distances of two pairs."""

    features = ("x", "view", "label")

    def forward(self, batch, training):
        anchor, positive = self.model(batch["x"]), self.model(batch["view"])
        negative = self.model(tf.reverse(batch["x"], axis=[1]))
        return [tf.reduce_sum((anchor - other) ** 2, -1) for other in (positive, negative)]

    def per_example_loss(self, batch, outputs):
        near, far = outputs
        return tf.maximum(near - far + 0.5, 0.0)


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


class Gram(Case):
    """The style of an image: products of its channels, in a model of convolutions."""

    features = ("image", "label")

    def build_model(self):
        image = tf_keras.Input([6, 6, 3])
        features = layers.Conv2D(4, 3)(image)
        gram = layers.Lambda(lambda f: tf.einsum("bijc,bijd->bcd", f, f) / 16)(features)
        return tf_keras.Model(image, layers.Dense(CLASSES)(layers.Flatten()(gram)))


class MixtureDensity(Case):
    """The likelihood of a number under a mixture of normal distributions."""

    features = ("x", "amount")

    def build_model(self):
        return tf_keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(6)])

    def forward(self, batch, training):
        return self.model(batch["x"])

    def per_example_loss(self, batch, outputs):
        logits, mean, scale = tf.split(outputs, 3, axis=-1)
        scale = tf.nn.softplus(scale) + 0.1
        density = -0.5 * ((batch["amount"][:, None] - mean) / scale) ** 2 - tf.math.log(scale)
        return -tf.reduce_logsumexp(tf.nn.log_softmax(logits) + density, axis=-1)
