"""The cases that draw random numbers, with `ctl.random` in place of TensorFlow's operations."""

import tensorflow as tf
import tf_keras

import ctl
from tests.users_code import generative, mixing, normalization
from tests.users_code.examples import CLASSES, Case, dense

layers = tf_keras.layers


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


class BayesianDense(normalization.BayesianDense):
    def draw(self, shape, dtype):
        return ctl.random.normal(shape, dtype=dtype, shared=True)


class BayesianCase(Case):
    def build_model(self):
        return dense(BayesianDense())
