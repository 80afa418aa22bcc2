"""Layers that draw random numbers: noise, dropped parts, random transformations of images."""

import math

import tensorflow as tf
import tf_keras

from tests.users_code.examples import EXAMPLES, Case, convolutional, dense

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


class AdaptedNormalization(Case):
    """Keras' Normalization layer, adapted to the data before training."""

    def build_model(self):
        normalization = layers.Normalization()
        normalization.adapt(EXAMPLES["x"])
        return tf_keras.Sequential([normalization, dense()])
