"""A variational autoencoder of 28 x 28 images (Kingma and Welling 2014, arXiv:1312.6114).

The pixels are probabilities, as in PyTorch's example, whose sizes these are.
"""

import tensorflow as tf
import tf_keras

import ctl

_LAYERS = tf_keras.layers


class Autoencoder(tf_keras.Model):
    """[rows, 28, 28] pixels -> their logits, and the mean and log variance of the latent variables."""

    def __init__(self, *, hidden, latent):
        super().__init__()
        self.latent = latent
        self.encoder = tf_keras.Sequential(
            [
                _LAYERS.Flatten(),
                _LAYERS.Dense(hidden, activation="relu"),
                _LAYERS.Dense(2 * latent),
            ]
        )
        self.decoder = tf_keras.Sequential(
            [
                _LAYERS.Dense(hidden, activation="relu"),
                _LAYERS.Dense(28 * 28),
                _LAYERS.Reshape((28, 28)),
            ]
        )

    def call(self, x):
        mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
        # Keyed by the row of the global batch: the same on any number of replicas, after a resume, and
        # in each evaluation.
        noise = ctl.random.normal([None, self.latent], dtype=mean.dtype)
        return self.decoder(mean + tf.exp(log_variance / 2) * noise), mean, log_variance


class VaeTrainer(ctl.StandardTrainer):
    """Minimizes the negative evidence lower bound, in nats per image."""

    def build_model(self):
        return Autoencoder(**self.options.model)

    def build_dataset(self, split, input_context):
        return ctl.data.idx(self.options.data.dir, split)

    def per_example_loss(self, batch, outputs):
        logits, mean, log_variance = outputs
        pixels = tf.nn.sigmoid_cross_entropy_with_logits(labels=batch["image"], logits=logits)
        # Appendix B of the paper.
        divergence = -0.5 * (1 + log_variance - mean**2 - tf.exp(log_variance))
        return tf.reduce_sum(pixels, axis=[1, 2]) + tf.reduce_sum(divergence, axis=1)

    def build_actions(self):
        return [Samples()]


class Samples(ctl.Action):
    """Writes images of random latent variables to the summaries, at each evaluation."""

    def __call__(self, outputs):
        model = self.controller.trainer.model
        latent = tf.random.stateless_normal([16, model.latent], seed=[0, 0])
        images = tf.sigmoid(model.decoder(latent))
        tf.summary.image("samples", images[..., tf.newaxis], max_outputs=16)
