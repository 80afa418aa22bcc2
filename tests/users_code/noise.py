"""Layers that draw random numbers: noise, dropped parts, random transformations of images."""

import math

import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, EXAMPLES, Case, convolutional, dense

layers = tf_keras.layers


class KerasNoise(Case):
    """The noise layers of Keras, which need nothing."""

    def build_model(self):
        return dense(layers.GaussianNoise(0.3), layers.Dropout(0.4), layers.AlphaDropout(0.2))


class SpatialDropout(Case):
    features = ("image", "label")

    def build_model(self):
        return convolutional(layers.SpatialDropout2D(0.5))


class StochasticDepth(layers.Layer):
    """Drops the complete residual branch of an image (Keras: compact convolutional transformers)."""

    def __init__(self, drop_rate=0.4):
        super().__init__()
        self.drop_rate = drop_rate
        self.branch = layers.Conv2D(2, 3, padding="same")

    def draw(self, shape):
        return tf.random.uniform(shape, 0, 1)

    def call(self, x, training=None):
        y = self.branch(x)
        if training:
            keep = 1 - self.drop_rate
            shape = (tf.shape(y)[0],) + (1,) * (y.shape.rank - 1)
            y = y / keep * tf.floor(keep + tf.cast(self.draw(shape), y.dtype))
        return x + y


class StochasticDepthCase(Case):
    features = ("image", "label")

    def build_model(self):
        return convolutional(StochasticDepth())


class RandomErasing(layers.Layer):
    """Sets a square at a random place of each image to zero."""

    size = 3

    def draw(self, count, limit):
        return tf.random.uniform([count], 0, limit, tf.int32)

    def call(self, images, training=None):
        if not training:
            return images
        count, height, width = tf.shape(images)[0], images.shape[1], images.shape[2]
        top = self.draw(count, height - self.size + 1)[:, None, None]
        left = self.draw(count, width - self.size + 1)[:, None, None]
        y, x = tf.range(height)[None, :, None], tf.range(width)[None, None, :]
        inside = (y >= top) & (y < top + self.size) & (x >= left) & (x < left + self.size)
        return tf.where(inside[..., None], tf.zeros_like(images), images)


class RandomErasingCase(Case):
    features = ("image", "label")

    def build_model(self):
        first = [RandomErasing(), layers.Conv2D(2, 3, activation="relu"), layers.Flatten()]
        return tf_keras.Sequential([*first, layers.Dense(CLASSES)])


class PreprocessingCase(Case):
    """A preprocessing layer of Keras in the model, as the tutorials place it."""

    features = ("image", "label")

    def build_layer(self):
        raise NotImplementedError

    def build_model(self):
        return tf_keras.Sequential([self.build_layer(), convolutional()])


class RandomFlipCase(PreprocessingCase):
    def build_layer(self):
        return layers.RandomFlip("horizontal")


class RandomTranslationCase(PreprocessingCase):
    def build_layer(self):
        return layers.RandomTranslation(0.2, 0.2)


class FourierFeatures(Case):
    """A fixed random projection (Keras: NeRF; TensorFlow: RandomFourierFeatures), not per row."""

    def forward(self, batch, training):
        projection = tf.random.stateless_normal([6, 4], seed=[1, 2], dtype=batch["x"].dtype)
        angles = 2 * math.pi * batch["x"] @ projection
        features = tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)
        return self.model(features, training=training)


class LambdaDropout(Case):
    """Dropout by a function of the backend, in a Lambda layer."""

    def build_model(self):
        return dense(layers.Lambda(lambda x: tf_keras.backend.dropout(x, 0.4)))


class VirtualAdversarial(Case):
    """A random direction per row, made adversarial by one gradient, as in VAT."""

    def draw(self, x):
        return tf.random.normal(tf.shape(x), dtype=x.dtype)

    def per_example_loss(self, batch, outputs):
        x = batch["x"]
        direction = tf.math.l2_normalize(self.draw(x), axis=1) * 0.1
        target = tf.stop_gradient(tf.nn.softmax(outputs))

        def divergence(offset):
            predicted = self.model(x + offset, training=True)
            return tf.nn.softmax_cross_entropy_with_logits(target, predicted)

        with tf.GradientTape() as tape:
            tape.watch(direction)
            distance = divergence(direction)
        gradient = tape.gradient(distance, direction)
        adversarial = tf.stop_gradient(0.5 * tf.math.l2_normalize(gradient, axis=1))
        return super().per_example_loss(batch, outputs) + divergence(adversarial)


class FastGradientSign(Case):
    """Adversarial training by the sign of the gradient with respect to the input, without noise."""

    def per_example_loss(self, batch, outputs):
        with tf.GradientTape() as tape:
            tape.watch(batch["x"])
            clean = super().per_example_loss(batch, self.model(batch["x"], training=True))
        sign = tf.sign(tape.gradient(clean, batch["x"]))
        moved = self.model(batch["x"] + 0.1 * tf.stop_gradient(sign), training=True)
        return super().per_example_loss(batch, outputs) + super().per_example_loss(batch, moved)


class AdaptedNormalization(Case):
    """Keras' Normalization layer, adapted to the data before training."""

    def build_model(self):
        normalization = layers.Normalization()
        normalization.adapt(EXAMPLES["x"])
        return tf_keras.Sequential([normalization, dense()])
