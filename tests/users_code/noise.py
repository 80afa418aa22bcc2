"""Layers that draw random numbers: noise, dropped parts, random transformations of images."""

import tf_keras

from tests.users_code.examples import EXAMPLES, Case, convolutional, dense

layers = tf_keras.layers


class KerasNoise(Case):
    """The noise layers of Keras, which need nothing."""

    def build_model(self):
        return dense(layers.GaussianNoise(0.3), layers.Dropout(0.4), layers.AlphaDropout(0.2))


class RandomFlipCase(Case):
    """A preprocessing layer of Keras in the model, as the tutorials place it."""

    features = ("image", "label")

    def build_model(self):
        return tf_keras.Sequential([layers.RandomFlip("horizontal"), convolutional()])


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
