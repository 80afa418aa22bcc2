"""Losses of single rows, as tutorials write them, and weights."""

import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, Case

layers = tf_keras.layers


class FocalLoss(Case):
    def per_example_loss(self, batch, outputs):
        labels = tf.one_hot(batch["label"], CLASSES)
        loss = tf_keras.losses.BinaryFocalCrossentropy(gamma=2, from_logits=True, reduction="none")
        return loss(labels, outputs)


class SegmentationByPixel(Case):
    """Cross entropy of each pixel: [rows, height, width], with a weight for each pixel."""

    features = ("image", "segmentation")

    def build_model(self):
        return tf_keras.Sequential([layers.Conv2D(2, 3, padding="same")])

    def forward(self, batch, training):
        return self.model(batch["image"], training=training)

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["segmentation"], outputs, from_logits=True
        )

    def sample_weight(self, batch):
        return tf.gather(
            tf.constant([1.0, 2.0], tf.float64), tf.cast(batch["segmentation"][..., 0], tf.int32)
        )


class SampledSoftmax(Case):
    """Word vectors by sampled softmax, whose negatives TensorFlow draws itself."""

    features = ("tokens", "label")

    def build_model(self):
        return WordVectors()

    def forward(self, batch, training):
        return self.model(batch["tokens"])

    def per_example_loss(self, batch, outputs):
        vectors, table, bias = (tf.cast(x, tf.float32) for x in outputs)  # it has no float64
        words = tf.cast(batch["tokens"][:, :1], tf.int64)
        return tf.nn.sampled_softmax_loss(table, bias, words, vectors, 3, 11)


class WordVectors(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(11, 3)
        self.table = self.add_weight(name="table", shape=(11, 3))
        self.bias = self.add_weight(name="bias", shape=(11,), initializer="zeros")

    def call(self, tokens):
        vectors = tf.reduce_mean(self.embedding(tokens[:, 1:]), axis=1)
        return vectors, tf.identity(self.table), tf.identity(self.bias)


class UncertaintyWeights(Case):
    """Two tasks weighted by learned variances, which are variables of the trainer's model."""

    features = ("x", "amount", "label")

    def build_model(self):
        return TwoTasks()

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        logits, amount, logs = outputs
        one = super().per_example_loss(batch, logits)
        two = (amount[:, 0] - batch["amount"]) ** 2
        return tf.exp(-logs[0]) * one + tf.exp(-logs[1]) * two + tf.reduce_sum(logs)


class TwoTasks(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.first, self.second = layers.Dense(CLASSES), layers.Dense(1)
        self.logs = self.add_weight(name="logs", shape=(2,), initializer="zeros")

    def call(self, x):
        hidden = self.hidden(x)
        return self.first(hidden), self.second(hidden), tf.identity(self.logs)


class ActorCritic(Case):
    """Samples an action of each row from the policy (Keras: actor critic)."""

    def build_model(self):
        return TwoTasks()

    def sample(self, logits):
        return tf.random.categorical(logits, 1, dtype=tf.int32)[:, 0]

    def per_example_loss(self, batch, outputs):
        logits, value, _ = outputs
        action = self.sample(logits)
        reward = tf.cast(tf.equal(action, batch["label"]), value.dtype)
        chosen = tf.gather(tf.nn.log_softmax(logits), action, axis=1, batch_dims=1)
        advantage = reward - value[:, 0]
        return -chosen * tf.stop_gradient(advantage) + advantage**2
