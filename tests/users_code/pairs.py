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
        return self.model(batch["x"], training=training), self.model(
            batch["view"], training=training
        )


class ContrastiveLoss(Embedding):
    """The other view of a row against those of all rows (Keras: semi-supervised SimCLR)."""

    def per_example_loss(self, batch, outputs):
        similarity = cosine(*outputs) / 0.5
        labels = tf.range(tf.shape(similarity)[0])
        one = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, similarity)
        two = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.transpose(similarity))
        return (one + two) / 2


class SupervisedContrastiveLoss(Embedding):
    """All rows of the same class are positives (Khosla et al. 2020)."""

    def per_example_loss(self, batch, outputs):
        similarity = cosine(outputs[0], outputs[0]) / 0.5
        same = tf.equal(batch["label"][:, None], batch["label"][None, :])
        others = 1 - tf.eye(tf.shape(similarity)[0], dtype=similarity.dtype)
        positives = tf.cast(same, similarity.dtype) * others
        log_sum = tf.math.log(tf.reduce_sum(tf.exp(similarity) * others, axis=1, keepdims=True))
        sums = tf.reduce_sum(positives * (similarity - log_sum), axis=1)
        return -tf.math.divide_no_nan(sums, tf.reduce_sum(positives, axis=1))


class NPairs(Embedding):
    """The n-pairs loss: a scalar, as `tfa.losses.npairs_loss` returns it."""

    def per_example_loss(self, batch, outputs):
        similarity = tf.matmul(*outputs, transpose_b=True)
        same = tf.equal(batch["label"][:, None], batch["label"][None, :])
        targets = tf.cast(same, similarity.dtype)
        targets /= tf.reduce_sum(targets, axis=1, keepdims=True)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(targets, similarity))


def squared_distances(a, b):
    squares = tf.reduce_sum(a**2, axis=1)[:, None] + tf.reduce_sum(b**2, axis=1)[None, :]
    return tf.maximum(squares - 2 * tf.matmul(a, b, transpose_b=True), 0)


def hardest_triplet(distances, same):
    """The loss of each row: its farthest positive against its nearest negative (batch hard)."""
    positives = tf.where(same, distances, tf.zeros_like(distances))
    negatives = tf.where(
        same, tf.fill(tf.shape(distances), tf.cast(1e9, distances.dtype)), distances
    )
    return tf.nn.relu(tf.reduce_max(positives, axis=1) - tf.reduce_min(negatives, axis=1) + 1)


class HardTriplets(Embedding):
    def per_example_loss(self, batch, outputs):
        same = tf.equal(batch["label"][:, None], batch["label"][None, :])
        return hardest_triplet(squared_distances(outputs[0], outputs[0]), same)


class SemiHardTriplets(Embedding):
    """The mean over all pairs of a class, of their nearest negative that is farther: a scalar."""

    def per_example_loss(self, batch, outputs):
        distances = squared_distances(outputs[0], outputs[0])
        same = tf.equal(batch["label"][:, None], batch["label"][None, :])
        count = tf.shape(distances)[0]
        positive, negative = distances[:, :, None], distances[:, None, :]
        candidates = ~same[:, None, :] & (negative > positive)
        far = tf.where(candidates, negative, tf.cast(1e9, distances.dtype))
        inside = tf.reduce_max(tf.where(same, tf.zeros_like(distances), distances), axis=1)
        exists = tf.reduce_any(candidates, axis=2)
        chosen = tf.where(exists, tf.reduce_min(far, axis=2), inside[:, None])
        pairs = tf.cast(same, distances.dtype) - tf.eye(count, dtype=distances.dtype)
        losses = tf.nn.relu((distances - chosen + 1) * pairs)
        return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.reduce_sum(pairs))


class HardestExamples(Case):
    """Only the half of the batch with the largest losses counts: top_k, then [k] losses."""

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return tf.math.top_k(losses, k=tf.shape(losses)[0] // 2).values


class HardestExamplesMask(Case):
    """The same with a mask, so that the shape is [rows]."""

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        smallest = tf.reduce_min(tf.math.top_k(losses, k=tf.shape(losses)[0] // 2).values)
        return tf.where(losses >= smallest, losses, tf.zeros_like(losses))


class BarlowTwins(Embedding):
    """The correlation matrix of two views, normalized over the batch: a scalar (Keras)."""

    def per_example_loss(self, batch, outputs):
        def normalize(z):
            return (z - tf.reduce_mean(z, axis=0)) / tf.math.reduce_std(z, axis=0)

        count = tf.cast(tf.shape(outputs[0])[0], outputs[0].dtype)
        correlation = tf.matmul(*map(normalize, outputs), transpose_a=True) / count
        return tf.reduce_sum((correlation - tf.eye(4, dtype=count.dtype)) ** 2)


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


class NormalizedAdvantage(Case):
    """Policy gradient whose advantages are standardized over the batch, as in PPO."""

    features = ("x", "amount", "label")

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        advantage = batch["amount"]
        mean, deviation = tf.reduce_mean(advantage), tf.math.reduce_std(advantage)
        advantage = (advantage - mean) / (deviation + 1e-8)
        log_probability = tf.nn.log_softmax(outputs)
        chosen = tf.gather(log_probability, batch["label"], axis=1, batch_dims=1)
        return -advantage * chosen


class CrossBatchNormalizer(Case):
    """Layers that normalize over axis 0 by mistake."""

    def forward(self, batch, training):
        return self.model(tf.math.l2_normalize(batch["x"], axis=0), training=training)


class LayerNormalizationOfRows(Case):
    def build_model(self):
        return tf_keras.Sequential(
            [layers.Dense(4), layers.LayerNormalization(axis=0), layers.Dense(3)]
        )
