"""Small trainers as users write them, right ones and ones with a mistake, for the tests of --mode=check.

Each is a complete experiment: `user_trainers.py:Name` is the trainer of a config. The numbers of rows
are small, so that a check of one takes seconds.
"""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

layers = tf_keras.layers
DRAW = np.random.default_rng(0)
POINTS = DRAW.normal(size=(40, 6)).astype(np.float32)
LABELS = (POINTS[:, 0] > 0).astype(np.int32) + (POINTS[:, 1] > 0)
TARGETS = (POINTS[:, :1] - 2 * POINTS[:, 1:2]).astype(np.float32)


class Classifier(ctl.StandardTrainer):
    """The base of the others: one dense network."""

    def build_model(self):
        return tf_keras.Sequential(
            [layers.Dense(16, activation="tanh", input_shape=(6,)), layers.Dense(3)]
        )

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": POINTS, "label": LABELS})

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )


class Gan(ctl.StandardTrainer):
    """Two models and two optimizers. The second optimizer creates its slots in the first step.

    It defines no per_example_loss, which a GAN does not have.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.discriminator = tf_keras.Sequential(
                [layers.Dense(8, activation="tanh", input_shape=(6,)), layers.Dense(1)]
            )
            self.discriminator_optimizer = tf_keras.optimizers.Adam(3e-3)

    def build_model(self):
        return tf_keras.Sequential(
            [layers.Dense(8, activation="tanh", input_shape=(6,)), layers.Dense(6)]
        )

    def build_dataset(self, split, input_context):
        noise = np.random.default_rng(1).normal(size=POINTS.shape).astype(np.float32)
        return ctl.data.arrays({"x": noise, "real": POINTS})

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def generator_loss(self, rows):
        return tf.math.softplus(-self.discriminator(self.model(rows["x"], training=True))[:, 0])

    def discriminator_loss(self, rows):
        real = self.discriminator(rows["real"])[:, 0]
        generated = self.discriminator(self.model(rows["x"], training=True))[:, 0]
        return tf.math.softplus(-real) + tf.math.softplus(generated)

    def replica_step(self, batch):
        self.minimize(
            batch,
            self.discriminator_loss,
            variables=self.discriminator.trainable_variables,
            optimizer=self.discriminator_optimizer,
            regularization=list,
        )
        return self.minimize(batch, self.generator_loss)


class Autoencoder(Classifier):
    """Two models, of which one layer changes in the second step: the kernel after it is zero."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            hidden = layers.Dense(8, activation="relu", input_shape=(4,))
            self.decoder = tf_keras.Sequential(
                [hidden, layers.Dense(6, kernel_initializer="zeros")]
            )
            self.decoder_optimizer = tf_keras.optimizers.Adam(3e-3)

    def build_model(self):
        hidden = layers.Dense(8, activation="relu", input_shape=(6,))
        return tf_keras.Sequential([hidden, layers.Dense(4)])

    def losses(self, rows):
        return 100 * tf.reduce_sum((self.decoder(self.model(rows["x"])) - rows["x"]) ** 2, axis=1)

    def replica_step(self, batch):
        variables = self.decoder.trainable_variables
        self.minimize(batch, self.losses, variables=variables, optimizer=self.decoder_optimizer)
        return self.minimize(batch, self.losses)


class GanWithoutDiscriminatorGradient(Gan):
    """The discriminator never learns."""

    def discriminator_loss(self, rows):
        return tf.stop_gradient(super().discriminator_loss(rows))


class HardExamples(Classifier):
    """Trains on the two hardest rows, of its own replica: wrong, and one row raises an error."""

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        smallest = tf.math.top_k(losses, k=2).values[-1]
        return tf.where(losses >= smallest, losses, tf.zeros_like(losses))


class TwoTowers(Classifier):
    """SimCLR's loss over the pairs of the global batch, which `ctl.replica.all_gather` collects."""

    def build_model(self):
        return tf_keras.Sequential(
            [layers.Dense(16, activation="tanh", input_shape=(6,)), layers.Dense(4)]
        )

    def build_dataset(self, split, input_context):
        other = (POINTS + 0.1 * np.random.default_rng(1).normal(size=POINTS.shape)).astype(
            np.float32
        )
        return ctl.data.arrays({"x": POINTS, "other": other})

    def forward(self, batch, training):
        towers = [self.model(batch[name], training=training) for name in ("x", "other")]
        return [tf.math.l2_normalize(tower, axis=1) for tower in towers]

    def per_example_loss(self, batch, outputs):
        one, other = outputs
        similarity = 5 * tf.matmul(one, ctl.replica.all_gather(other), transpose_b=True)
        position = ctl.replica.positions(other)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(position, similarity)


class Regression(Classifier):
    """Plain float32 examples, without any cast: float64 outputs would not match float32 targets."""

    def build_model(self):
        return tf_keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(1)])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": POINTS, "label": TARGETS})

    def per_example_loss(self, batch, outputs):
        return tf.reduce_mean(tf.square(outputs - batch["label"]), axis=1)


class OnlyFloat32(Regression):
    """A cast in the user's code, for which float64 cannot be computed."""

    def forward(self, batch, training):
        outputs = self.model(batch["x"], training=training)
        return outputs * tf.constant([0.5], tf.float32)


class Tagger(ctl.StandardTrainer):
    """A label for each token of texts of different lengths; 0 is padding."""

    def build_model(self):
        return tf_keras.Sequential([layers.Embedding(20, 8), layers.Dense(5)])

    def build_dataset(self, split, input_context):
        draw = np.random.default_rng(2)
        lengths = draw.integers(1, 13, (40, 1))
        x = np.where(np.arange(12) < lengths, draw.integers(1, 20, (40, 12)), 0)
        return ctl.data.arrays({"x": x, "label": x % 5})

    def tokens(self, batch):
        return tf.cast(batch["x"] > 0, self.compute_dtype)

    def token_losses(self, batch, outputs):
        losses = tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )
        return losses * tf.cast(self.tokens(batch), losses.dtype)

    def per_example_loss(self, batch, outputs):
        tokens = tf.cast(tf.reduce_sum(self.tokens(batch), axis=1), outputs.dtype)
        return tf.reduce_sum(self.token_losses(batch, outputs), axis=1) / tokens

    def sample_weight(self, batch):
        return tf.reduce_sum(self.tokens(batch), axis=1)


class TokensCountedTwice(Tagger):
    """The loss is a sum over the tokens, and the weight is their number."""

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(self.token_losses(batch, outputs), axis=1)


class RaisesInMetrics(Classifier):
    """An exception of the user's code in the middle of the step."""

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["accurracy"].update_state(batch["label"], outputs)


class Texts(Classifier):
    """The features are texts, whose vocabulary is a part of the model."""

    TEXTS = np.array(["a good film", "bad", "a very good film", "a very bad film"] * 10)

    def build_model(self):
        vocabulary = layers.TextVectorization(output_sequence_length=4)
        vocabulary.adapt(self.TEXTS)
        return tf_keras.Sequential(
            [
                tf_keras.Input([], dtype=tf.string),
                vocabulary,
                layers.Embedding(vocabulary.vocabulary_size(), 4),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3),
            ]
        )

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"text": self.TEXTS, "label": LABELS})
