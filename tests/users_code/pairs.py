"""Losses over pairs of rows: contrastive learning, triplets, mining, sums over the batch."""

import tensorflow as tf
import tf_keras

from tests.users_code.examples import Case

layers = tf_keras.layers


def cosine(a, b):
    """The similarity of each row of a with each row of b."""
    a, b = tf.math.l2_normalize(a, axis=1), tf.math.l2_normalize(b, axis=1)
    return tf.matmul(a, b, transpose_b=True)


class Embedding(Case):
    """Embeds the examples; a case defines the loss of the embeddings."""

    features = ("x", "view", "label")

    def build_model(self):
        return tf_keras.Sequential([layers.Dense(5, activation="tanh"), layers.Dense(4)])

    def forward(self, batch, training):
        return tuple(self.model(batch[name], training=training) for name in ("x", "view"))


class ContrastiveLoss(Embedding):
    """The other view of a row against those of all rows (Keras: semi-supervised SimCLR)."""

    def per_example_loss(self, batch, outputs):
        similarity = cosine(*outputs) / 0.5
        labels = tf.range(tf.shape(similarity)[0])
        one = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, similarity)
        two = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.transpose(similarity))
        return (one + two) / 2


class HardestExamples(Case):
    """Only the half of the batch with the largest losses counts: top_k, then [k] losses."""

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return tf.math.top_k(losses, k=tf.shape(losses)[0] // 2).values


class BatchDice(Case):
    """Dice over the complete batch: a scalar, as many segmentation notebooks compute it."""

    features = ("image", "segmentation")

    def build_model(self):
        return tf_keras.Sequential([layers.Conv2D(1, 3, padding="same", activation="sigmoid")])

    def forward(self, batch, training):
        return self.model(batch["image"], training=training)

    axis = None

    def per_example_loss(self, batch, outputs):
        target = batch["segmentation"]
        both = tf.reduce_sum(target * outputs, axis=self.axis)
        sums = tf.reduce_sum(target + outputs, axis=self.axis)
        return 1 - (2 * both + 1) / (sums + 1)


class Dice(BatchDice):
    """Dice of each image."""

    axis = (1, 2, 3)
