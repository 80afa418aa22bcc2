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


class GanWithLocalMean(Gan):
    """Each replica adds the mean over its own rows to the discriminator's gradient."""

    def replica_step(self, batch):
        variables = self.discriminator.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.discriminator_loss(batch))
        gradients = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, tape.gradient(loss, variables)
        )
        self.discriminator_optimizer.apply_gradients(
            zip(gradients, variables, strict=True), experimental_aggregate_gradients=False
        )
        return self.minimize(batch, self.generator_loss)


class Vae(Classifier):
    """Two models, of which the first layers change in the second step: the last kernel is zero."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.decoder = tf_keras.Sequential(
                [
                    layers.Dense(8, activation="relu", input_shape=(2,)),
                    layers.Dense(6, kernel_initializer="zeros"),
                ]
            )
            self.decoder_optimizer = tf_keras.optimizers.Adam(3e-3)

    def build_model(self):
        return tf_keras.Sequential(
            [layers.Dense(8, activation="relu", input_shape=(6,)), layers.Dense(4)]
        )

    def negative_elbo(self, batch):
        mean, log_variance = tf.split(self.model(batch["x"], training=True), 2, axis=1)
        noise = ctl.random.normal(tf.shape(mean), dtype=mean.dtype)
        outputs = self.decoder(mean + tf.exp(log_variance / 2) * noise, training=True)
        divergence = 0.5 * tf.reduce_sum(mean**2 + tf.exp(log_variance) - log_variance - 1, axis=1)
        return 100 * (tf.reduce_sum((outputs - batch["x"]) ** 2, axis=1) + divergence)

    def replica_step(self, batch):
        self.minimize(
            batch,
            self.negative_elbo,
            variables=self.decoder.trainable_variables,
            optimizer=self.decoder_optimizer,
        )
        return self.minimize(batch, self.negative_elbo)


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

    def candidates(self, other):
        """Returns what each row is compared with, and the position of its own partner there."""
        return ctl.replica.all_gather(other), ctl.replica.positions(other)

    def per_example_loss(self, batch, outputs):
        one, other = outputs
        candidates, position = self.candidates(other)
        similarity = 5 * tf.matmul(one, candidates, transpose_b=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(position, similarity)


class LocalNegatives(TwoTowers):
    """Compares each row with those of its own replica only."""

    def candidates(self, other):
        return other, tf.range(tf.shape(other)[0])


class NoisyAutoencoder(Classifier):
    """A variational autoencoder that draws noise in evaluation too, with a fixed seed."""

    def build_model(self):
        self.decoder = layers.Dense(6)
        return tf_keras.Sequential([layers.Dense(4, input_shape=(6,)), self.decoder])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": POINTS})

    def noise(self, code, training):
        return tf.random.stateless_normal(tf.shape(code), seed=[1, 2], dtype=code.dtype)

    def forward(self, batch, training):
        encoder, decoder = self.model.layers
        code = encoder(batch["x"])
        if not training:
            code += 0.1 * self.noise(code, training)
        return decoder(code)

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(tf.square(outputs - tf.cast(batch["x"], outputs.dtype)), axis=1)


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


class Ensemble(Classifier):
    """A list of models and a dict of optimizers, whose first model is `self.model`."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.members = [self.model, self.build_model()]
            self.optimizers = {"first": self.optimizer, "second": tf_keras.optimizers.Adam(0.01)}

    def replica_step(self, batch):
        losses = [
            self.minimize(
                batch,
                lambda rows, member=member: self.per_example_loss(rows, member(rows["x"])),
                variables=member.trainable_variables,
                optimizer=optimizer,
            )
            for member, optimizer in zip(self.members, self.optimizers.values(), strict=True)
        ]
        return tf.add_n(losses) / len(losses)


class Recomputed(Classifier):
    """`tf.recompute_grad` draws other dropout masks in the backward pass."""

    def build_model(self):
        return tf_keras.Sequential(
            [
                layers.Dense(16, activation="tanh", input_shape=(6,)),
                layers.Dropout(0.5),
                layers.Dense(3),
            ]
        )

    def forward(self, batch, training):
        if not training:
            return self.model(batch["x"], training=False)
        return tf.recompute_grad(lambda x: self.model(x, training=True))(batch["x"])


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
