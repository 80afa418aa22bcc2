"""The cases that draw random numbers, with `ctl.random` in place of TensorFlow's operations."""

import tensorflow as tf
import tf_keras

import ctl
from tests.users_code import generative, losses, mixing, noise, normalization, sequences
from tests.users_code.examples import CLASSES, WORDS, Case, convolutional, dense

layers = tf_keras.layers


class StochasticDepth(noise.StochasticDepth):
    def draw(self, shape):
        return ctl.random.uniform(shape)


class StochasticDepthCase(noise.StochasticDepthCase):
    def build_model(self):
        return convolutional(StochasticDepth())


class LambdaDropout(Case):
    def build_model(self):
        return dense(layers.Lambda(lambda x: ctl.random.dropout(x, 0.4)))


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


class Sampling(generative.Sampling):
    def draw(self, z_mean):
        return ctl.random.normal(tf.shape(z_mean), dtype=z_mean.dtype)


class VariationalAutoencoder(generative.VariationalAutoencoder):
    sampling = Sampling


class Diffusion(generative.Diffusion):
    def draw(self, x):
        times = ctl.random.uniform([None, 1], dtype=x.dtype)
        return times, ctl.random.normal(tf.shape(x), dtype=x.dtype)


class NoisyCell(sequences.NoisyCell):
    def drop(self, candidate):
        return ctl.random.dropout(candidate, 0.4)


class NoisyCellCase(sequences.SeriesCase):
    def build_layers(self):
        return [layers.RNN(NoisyCell())]


class MaskedLanguageModel(sequences.MaskedLanguageModel):
    def draw(self, tokens):
        shape = tf.shape(tokens)
        words = ctl.random.integers(shape, 1, WORDS, tokens.dtype)
        return ctl.random.bernoulli(shape, 0.4), ctl.random.bernoulli(shape, 0.8), words


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


class BayesianDense(normalization.BayesianDense):
    def draw(self, shape, dtype):
        return ctl.random.normal(shape, dtype=dtype, shared=True)


class BayesianCase(Case):
    def build_model(self):
        return dense(BayesianDense())
