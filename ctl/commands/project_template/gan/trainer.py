"""The two models, the data and the losses of PROJECT_NAME. Replace each by your own."""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

FEATURES = 2


class Trainer(ctl.StandardTrainer):
    """Generates points. `model` is the generator; each model has an optimizer of its own."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.discriminator = make_network(FEATURES, self.options.model.width, 1)
            self.discriminator_optimizer = tf_keras.optimizers.Adam(1e-3, beta_1=0.5)
            self.discriminator_optimizer.build(self.discriminator.trainable_variables)

    def build_model(self):
        return make_network(self.options.model.latent, self.options.model.width, FEATURES)

    def build_dataset(self, split, input_context):
        # Single examples: ctl shuffles and batches them, and splits the batches over the replicas.
        count, seed = (4000, 1) if split == "train" else (500, 2)
        return ctl.data.arrays(make_examples(count, seed))

    def forward(self, batch, training):
        # Keyed by the row of the global batch, so that any number of replicas draws the same.
        size, dtype = [None, self.options.model.latent], self.compute_dtype
        return self.model(ctl.random.normal(size, dtype=dtype, name="latent"), training=training)

    def discriminator_losses(self, batch):
        generated = tf.stop_gradient(self.forward(batch, training=True))
        real, fake = self.discriminator(batch["x"])[:, 0], self.discriminator(generated)[:, 0]
        return tf.nn.softplus(-real) + tf.nn.softplus(fake)

    def generator_losses(self, batch):
        return tf.nn.softplus(-self.discriminator(self.forward(batch, training=True))[:, 0])

    def replica_step(self, batch):
        loss = self.minimize(
            batch,
            self.discriminator_losses,
            variables=self.discriminator.trainable_variables,
            optimizer=self.discriminator_optimizer,
        )
        self.metrics["discriminator_loss"].update_state(loss)
        return self.minimize(batch, self.generator_losses)

    def build_metrics(self):
        return {"discriminator_loss": tf_keras.metrics.Mean()}

    def update_metrics(self, metrics, batch, outputs, weights):
        pass  # replica_step updates them

    def collect_outputs(self, batch, outputs):
        return {"real": batch["x"], "generated": outputs}

    def compute_metrics(self, collected):
        return {"distance": measure_distance(collected["real"], collected["generated"])}


def make_network(inputs, width, outputs):
    layers = tf_keras.layers
    return tf_keras.Sequential(
        [
            layers.Dense(width, activation="relu", input_shape=[inputs]),
            layers.Dense(width, activation="relu"),
            layers.Dense(outputs),
        ]
    )


def make_examples(count, seed):
    """Makes points in the shape of a tilted ellipse."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, FEATURES)) @ [[1.0, 0.8], [0.0, 0.3]] + [2.0, -1.0]
    return {"x": x.astype(np.float32)}


def measure_distance(one, other):
    """Returns how much the means and the covariances of two samples differ."""
    means = np.linalg.norm(one.mean(axis=0) - other.mean(axis=0))
    return means + np.linalg.norm(np.cov(one, rowvar=False) - np.cov(other, rowvar=False))
