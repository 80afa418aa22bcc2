"""The cases that draw random numbers, with `ctl.random` in place of TensorFlow's operations."""

import tensorflow as tf
import tf_keras

import ctl
from tests.users_code import generative, losses, mixing, noise, normalization, sequences
from tests.users_code.examples import CLASSES, TOKENS, WORDS, Case, convolutional, dense

layers = tf_keras.layers


class StochasticDepth(noise.StochasticDepth):
    def draw(self, shape):
        return ctl.random.uniform(shape)


class StochasticDepthCase(noise.StochasticDepthCase):
    def build_model(self):
        return convolutional(StochasticDepth())


class DropBlock(noise.DropBlock):
    def draw(self, shape, dtype):
        return ctl.random.uniform(shape, dtype=dtype)


class DropBlockCase(noise.DropBlockCase):
    def build_model(self):
        return convolutional(DropBlock())


def first_layer(layer):
    """The network of the cases that change images before a convolution."""
    last = [layers.Conv2D(2, 3, activation="relu"), layers.Flatten(), layers.Dense(CLASSES)]
    return tf_keras.Sequential([layer, *last])


class RandomErasing(noise.RandomErasing):
    def draw(self, count, limit):
        return ctl.random.integers([count], 0, limit)


class RandomErasingCase(noise.RandomErasingCase):
    def build_model(self):
        return first_layer(RandomErasing())


class RandomColorAffine(noise.RandomColorAffine):
    def draw(self, shape, limit):
        return ctl.random.uniform(shape, -limit, limit)


class RandomColorAffineCase(noise.RandomColorAffineCase):
    def build_model(self):
        return tf_keras.Sequential([RandomColorAffine(), convolutional()])


class RandAugment(noise.RandAugment):
    def draw(self, count, limit):
        return ctl.random.integers([count], 0, limit)


class RandAugmentCase(noise.RandAugmentCase):
    def build_model(self):
        return first_layer(RandAugment())


class RandomFlip(layers.Layer):
    """What replaces Keras' layer in the model."""

    def call(self, images, training=None):
        if not training:
            return images
        flipped = ctl.random.bernoulli([None, 1, 1, 1])
        return tf.where(flipped, tf.image.flip_left_right(images), images)


class RandomFlipCase(noise.RandomFlipCase):
    def build_model(self):
        return first_layer(RandomFlip())


class QuantizationNoise(noise.QuantizationNoise):
    def draw(self, x):
        return ctl.random.uniform(tf.shape(x), -0.5, 0.5, dtype=x.dtype)


class QuantizationNoiseCase(Case):
    def build_model(self):
        return dense(QuantizationNoise())


class GumbelSoftmax(noise.GumbelSoftmax):
    def draw(self, shape, dtype):
        return ctl.random.uniform(shape, dtype=dtype)


class GumbelSoftmaxCase(Case):
    def build_model(self):
        return dense(GumbelSoftmax())


class LambdaDropout(Case):
    def build_model(self):
        return dense(layers.Lambda(lambda x: ctl.random.dropout(x, 0.4)))


class VirtualAdversarial(noise.VirtualAdversarial):
    def draw(self, x):
        return ctl.random.normal(tf.shape(x), dtype=x.dtype)


class MixUp(mixing.MixUp):
    def draw_share(self, count, dtype):
        return ctl.random.beta([count], self.alpha, self.alpha, dtype)

    def mix(self, batch):
        partners = ctl.random.permutation_of_batch()
        share = self.draw_share(None, batch["x"].dtype)[:, None]
        labels = tf.one_hot(batch["label"], CLASSES, dtype=batch["x"].dtype)
        x, all_labels = ctl.replica.all_gather((batch["x"], labels))
        return {
            "x": share * batch["x"] + (1 - share) * tf.gather(x, partners),
            "label": share * labels + (1 - share) * tf.gather(all_labels, partners),
        }


class CutMix(mixing.CutMix):
    def draw_corner(self, count, limit):
        return ctl.random.integers([count], 0, limit)

    def partners(self, images, labels):
        order = ctl.random.permutation_of_batch()
        images, labels = ctl.replica.all_gather((images, labels))
        return tf.gather(images, order), tf.gather(labels, order)


class LabelNoise(mixing.LabelNoise):
    def draw(self, label):
        chosen = ctl.random.bernoulli(tf.shape(label), 0.2)
        return chosen, ctl.random.integers(tf.shape(label), 0, CLASSES, label.dtype)


class Sampling(generative.Sampling):
    def draw(self, z_mean):
        return ctl.random.normal(tf.shape(z_mean), dtype=z_mean.dtype)


class VariationalAutoencoder(generative.VariationalAutoencoder):
    sampling = Sampling


class Diffusion(generative.Diffusion):
    def draw(self, x):
        times = ctl.random.uniform([None, 1], dtype=x.dtype)
        return times, ctl.random.normal(tf.shape(x), dtype=x.dtype)


class DiscreteDiffusion(generative.Diffusion):
    def draw(self, x):
        times = ctl.random.integers([None], 0, 100)
        noise = ctl.random.normal(tf.shape(x), dtype=x.dtype)
        return tf.cast(times, x.dtype)[:, None] / 100, noise


class AdversarialNetworks(generative.AdversarialNetworks):
    def draw_noise(self, x):
        return ctl.random.normal([None, 3], dtype=x.dtype)

    def draw_smoothing(self, logits):
        return ctl.random.uniform(tf.shape(logits), dtype=logits.dtype)


class GradientPenalty(generative.GradientPenalty):
    def draw_noise(self, x):
        return ctl.random.normal([None, 3], dtype=x.dtype)

    def draw_point(self, x):
        return ctl.random.uniform([None, 1], dtype=x.dtype)


class NoisyCell(sequences.NoisyCell):
    def drop(self, candidate):
        return ctl.random.dropout(candidate, 0.4)


class NoisyCellCase(sequences.SeriesCase):
    def build_layers(self):
        return [layers.RNN(NoisyCell())]


class Zoneout(sequences.Zoneout):
    def draw(self, shape, dtype):
        return ctl.random.uniform(shape, dtype=dtype)


class ZoneoutCase(sequences.SeriesCase):
    def build_layers(self):
        return [layers.RNN(Zoneout())]


class MaskedLanguageModel(sequences.MaskedLanguageModel):
    def draw(self, tokens):
        shape = tf.shape(tokens)
        words = ctl.random.integers(shape, 1, WORDS, tokens.dtype)
        return ctl.random.bernoulli(shape, 0.4), ctl.random.bernoulli(shape, 0.8), words


class MaskedPatches(sequences.MaskedPatches):
    def draw(self, count):
        return ctl.random.uniform([count, TOKENS], dtype=tf.float64)


class ActorCritic(losses.ActorCritic):
    def sample(self, logits):
        return ctl.random.categorical(logits, tf.int32)


class SampledSoftmax(losses.SampledSoftmax):
    """The same function of TensorFlow, with negatives that all rows share as sampled_values."""

    def per_example_loss(self, batch, outputs):
        vectors, table, bias = (tf.cast(x, tf.float32) for x in outputs)
        words = tf.cast(batch["tokens"][:, :1], tf.int64)
        negatives = ctl.random.integers([3], 0, WORDS, tf.int64, shared=True)
        counts = tf.fill(tf.shape(words), 3 / WORDS), tf.fill([3], 3 / WORDS)
        sampled_values = negatives, *counts
        losses_of_rows = tf.nn.sampled_softmax_loss(
            table, bias, words, vectors, 3, WORDS, sampled_values=sampled_values
        )
        return tf.cast(losses_of_rows, tf.float64)


class NoiseContrastive(losses.SampledSoftmax):
    """Negatives of each row's own, against the sigmoid."""

    def per_example_loss(self, batch, outputs):
        vectors, table, bias = outputs
        words = tf.concat([batch["tokens"][:, :1], ctl.random.integers([None, 3], 0, WORDS)], 1)
        logits = tf.einsum("bd,bnd->bn", vectors, tf.gather(table, words)) + tf.gather(bias, words)
        labels = tf.one_hot(tf.zeros_like(words[:, 0]), 4, dtype=logits.dtype)
        return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits), axis=1)


class BayesianDense(normalization.BayesianDense):
    def draw(self, shape, dtype):
        return ctl.random.normal(shape, dtype=dtype, shared=True)


class BayesianCase(Case):
    def build_model(self):
        return dense(BayesianDense())


class Flipout(normalization.Flipout):
    def draw(self, shape, dtype):
        return ctl.random.normal(shape, dtype=dtype, shared=True)

    def draw_sign(self, x, units):
        return 1 - 2 * ctl.random.bernoulli([None, units], dtype=x.dtype)


class FlipoutCase(Case):
    def build_model(self):
        return dense(Flipout())
