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


class DropBlock(layers.Layer):
    """Drops squares of a feature map; Bernoulli centres are widened by max pooling."""

    def draw(self, shape, dtype):
        return tf.random.uniform(shape, dtype=dtype)

    def call(self, x, training=None):
        if not training:
            return x
        centres = tf.cast(self.draw(tf.shape(x), x.dtype) < 0.1, x.dtype)
        keep = 1 - tf.nn.max_pool2d(centres, 3, 1, "SAME")
        kept = tf.reduce_mean(keep, axis=[1, 2, 3], keepdims=True)
        return tf.math.divide_no_nan(x * keep, kept)


class DropBlockCase(Case):
    features = ("image", "label")

    def build_model(self):
        return convolutional(DropBlock())


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


class RandomColorAffine(layers.Layer):
    """Brightness and colour jitter of each image (Keras: semi-supervised SimCLR)."""

    brightness, jitter = 0.6, 0.2

    def draw(self, shape, limit):
        return tf.random.uniform(shape, minval=-limit, maxval=limit)

    def call(self, images, training=True):
        if not training:
            return images
        count = tf.shape(images)[0]
        scales = 1 + tf.cast(self.draw((count, 1, 1, 1), self.brightness), images.dtype)
        jitter = tf.cast(self.draw((count, 1, 3, 3), self.jitter), images.dtype)
        colors = tf.eye(3, batch_shape=[count, 1], dtype=images.dtype) * scales + jitter
        return tf.clip_by_value(tf.matmul(images, colors), 0, 1)


class RandomColorAffineCase(Case):
    features = ("image", "label")

    def build_model(self):
        return tf_keras.Sequential([RandomColorAffine(), convolutional()])


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


class RandomZoomCase(PreprocessingCase):
    def build_layer(self):
        return layers.RandomZoom((-0.2, 0.0))


class RandomCropCase(PreprocessingCase):
    def build_layer(self):
        return layers.RandomCrop(4, 4)


class RandomContrastCase(PreprocessingCase):
    def build_layer(self):
        return layers.RandomContrast(0.2)


class RandomBrightnessCase(PreprocessingCase):
    def build_layer(self):
        return layers.RandomBrightness(0.2)


class RandAugment(layers.Layer):
    """One of three operations for each image, chosen at random in the model."""

    def draw(self, count, limit):
        return tf.random.uniform([count], maxval=limit, dtype=tf.int32)

    def call(self, images, training=None):
        if not training:
            return images
        choice = self.draw(tf.shape(images)[0], 3)
        choices = [images, tf.image.flip_left_right(images), 1 - images]
        return tf.gather(tf.stack(choices, axis=1), choice, axis=1, batch_dims=1)


class RandAugmentCase(Case):
    features = ("image", "label")

    def build_model(self):
        first = [RandAugment(), layers.Conv2D(2, 3, activation="relu"), layers.Flatten()]
        return tf_keras.Sequential([*first, layers.Dense(CLASSES)])


class QuantizationNoise(layers.Layer):
    """Additive noise that replaces rounding in training (TensorFlow: learned data compression)."""

    def draw(self, x):
        return tf.random.uniform(tf.shape(x), -0.5, 0.5, dtype=x.dtype)

    def call(self, x, training=None):
        return x + self.draw(x) if training else tf.round(x)


class QuantizationNoiseCase(Case):
    def build_model(self):
        return dense(QuantizationNoise())


class GumbelSoftmax(layers.Layer):
    """A relaxed one-hot sample."""

    def draw(self, shape, dtype):
        return tf.random.uniform(shape, dtype=dtype)

    def call(self, logits):
        noise = self.draw(tf.shape(logits), logits.dtype)
        gumbel = -tf.math.log(-tf.math.log(noise + 1e-20) + 1e-20)
        return tf.nn.softmax((logits + gumbel) / 0.7)


class GumbelSoftmaxCase(Case):
    def build_model(self):
        return dense(GumbelSoftmax())


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
