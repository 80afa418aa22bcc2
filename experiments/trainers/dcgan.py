"""An adversarial network of convolutions for 28 x 28 images (DCGAN, Radford et al. 2016).

The discriminator's gradient at real images is penalized (R1, Mescheder et al. 2018). The quality is a
Frechet distance (Heusel et al. 2017) in the features of a small classifier, the same in every run.
"""

import functools

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

_LAYERS = tf_keras.layers


def make_generator(latent, width):
    """[rows, latent] numbers -> [rows, 28, 28, 1] pixels from 0 to 1."""
    options = dict(strides=2, padding="same")
    return tf_keras.Sequential(
        [
            _LAYERS.Dense(7 * 7 * 2 * width, activation="relu", input_shape=[latent]),
            _LAYERS.Reshape([7, 7, 2 * width]),
            _LAYERS.Conv2DTranspose(width, 4, activation="relu", **options),
            _LAYERS.Conv2DTranspose(1, 4, activation="sigmoid", **options),
        ]
    )


def make_discriminator(width):
    """[rows, 28, 28, 1] pixels -> [rows, 1] logits of being real."""
    # tf.nn.leaky_relu makes TensorFlow's graph optimizer print an error about its second derivative.
    options = dict(strides=2, padding="same", activation=lambda x: tf.maximum(x, 0.2 * x))
    return tf_keras.Sequential(
        [
            _LAYERS.Rescaling(2.0, -1.0, input_shape=[28, 28, 1]),
            _LAYERS.Conv2D(width, 4, **options),
            _LAYERS.Conv2D(2 * width, 4, **options),
            _LAYERS.Flatten(),
            _LAYERS.Dense(1),
        ]
    )


class DcganTrainer(ctl.StandardTrainer):
    """`model` is the generator; each model has an optimizer of its own."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.discriminator = make_discriminator(self.options.model.width)
            self.discriminator_optimizer = tf_keras.optimizers.Adam(1e-3, beta_1=0.5)
            self.discriminator_optimizer.build(self.discriminator.trainable_variables)

    def build_model(self):
        return make_generator(self.options.model.latent, self.options.model.width)

    def build_dataset(self, split, input_context):
        return ctl.data.idx(self.options.data.dir, split)

    def build_metrics(self):
        return {"discriminator_loss": tf_keras.metrics.Mean()}

    def update_metrics(self, metrics, batch, outputs, weights):
        pass  # replica_step updates them

    def forward(self, batch, training):
        # Keyed by the row of the global batch, and the same in each evaluation.
        size, dtype = [None, self.options.model.latent], self.compute_dtype
        return self.model(ctl.random.normal(size, dtype=dtype, name="latent"))

    def discriminator_losses(self, batch):
        real, generated = batch["image"][..., tf.newaxis], self.forward(batch, training=True)
        with tf.GradientTape() as tape:
            tape.watch(real)
            logits = self.discriminator(real)[:, 0]
        slope = tf.reduce_sum(tape.gradient(logits, real) ** 2, axis=[1, 2, 3])
        fooled = self.discriminator(tf.stop_gradient(generated))[:, 0]
        return (
            tf.nn.softplus(-logits)
            + tf.nn.softplus(fooled)
            + self.options.model.penalty / 2 * slope
        )

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

    def collect_outputs(self, batch, outputs):
        return {"real": batch["image"][..., tf.newaxis], "generated": outputs}

    def compute_metrics(self, collected):
        distance = frechet_distance(*map(make_features(self.options.data.dir), collected.values()))
        return {"frechet_distance": distance}

    def build_actions(self):
        return [Samples()]


class Samples(ctl.Action):
    """Writes images of fixed latent numbers to the summaries, at each evaluation."""

    def __call__(self, outputs):
        trainer = self.controller.trainer
        latent = tf.random.stateless_normal([16, trainer.options.model.latent], seed=[0, 0])
        with trainer.averaged_weights():
            tf.summary.image("samples", trainer.model(latent), max_outputs=16)


@functools.cache
def make_features(folder):
    """Trains a classifier for an epoch; returns a function of images: [rows, 64] features."""
    source = ctl.data.idx(folder, "train")
    rows = source.gather(tf.range(len(source), dtype=tf.int64))

    start = tf_keras.initializers.GlorotUniform
    conv = dict(kernel_size=3, strides=2, activation="relu")
    model = tf_keras.Sequential(
        [
            _LAYERS.Conv2D(16, kernel_initializer=start(1), **conv),
            _LAYERS.Conv2D(32, kernel_initializer=start(2), **conv),
            _LAYERS.Flatten(),
            _LAYERS.Dense(64, activation="relu", kernel_initializer=start(3)),
            _LAYERS.Dense(10, kernel_initializer=start(4)),
        ]
    )
    model.compile("adam", tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    # In the order of the files, so that the features are the same in every run.
    model.fit(rows["image"][..., tf.newaxis] / 255, rows["label"], 128, shuffle=False, verbose=0)
    features = tf_keras.Sequential(model.layers[:-1])
    return lambda images: features.predict(images, verbose=0).astype(np.float64)


def frechet_distance(one, other):
    """Returns the distance of two normal distributions with the means and covariances of two samples."""
    mean = np.sum((one.mean(axis=0) - other.mean(axis=0)) ** 2)
    a, b = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    roots = np.sqrt(np.maximum(np.linalg.eigvals(a @ b).real, 0))
    return mean + np.trace(a) + np.trace(b) - 2 * roots.sum()
