"""Losses of single rows, as tutorials write them, and weights."""

import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, Case, convolutional, dense

layers = tf_keras.layers


class FocalLoss(Case):
    def per_example_loss(self, batch, outputs):
        labels = tf.one_hot(batch["label"], CLASSES)
        loss = tf_keras.losses.BinaryFocalCrossentropy(gamma=2, from_logits=True, reduction="none")
        return loss(labels, outputs)


class FocalLossByHand(Case):
    """(1 - p)^gamma cross entropy, and weights of the classes by sample_weight."""

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return (1 - tf.exp(-losses)) ** 2 * losses

    def sample_weight(self, batch):
        return tf.gather(tf.constant([0.5, 1.0, 2.5], tf.float64), batch["label"])


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


class SegmentationByImage(SegmentationByPixel):
    def per_example_loss(self, batch, outputs):
        weights = SegmentationByPixel.sample_weight(self, batch)
        return tf.reduce_mean(weights * super().per_example_loss(batch, outputs), axis=[1, 2])

    def sample_weight(self, batch):
        return None


class BoxLoss(Case):
    """Generalized intersection over union of boxes, and the absolute error."""

    features = ("image", "box")

    def build_model(self):
        return tf_keras.Sequential([convolutional(), layers.Dense(4)])

    def per_example_loss(self, batch, outputs):
        top, bottom = (
            tf.sigmoid(outputs[:, :2]),
            tf.sigmoid(outputs[:, :2]) + tf.exp(outputs[:, 2:]),
        )
        low, high = batch["box"][:, :2], batch["box"][:, 2:]
        overlap = tf.reduce_prod(
            tf.nn.relu(tf.minimum(bottom, high) - tf.maximum(top, low)), axis=1
        )
        union = tf.reduce_prod(bottom - top, axis=1) + tf.reduce_prod(high - low, axis=1) - overlap
        hull = tf.reduce_prod(tf.maximum(bottom, high) - tf.minimum(top, low), axis=1)
        generalized = overlap / union - (hull - union) / hull
        absolute = tf.reduce_mean(tf.abs(batch["box"] - tf.concat([top, bottom], axis=1)), axis=1)
        return 1 - generalized + absolute

    def forward(self, batch, training):
        return self.model(batch["image"], training=training)


class QuantileLoss(Case):
    """Three quantiles of one target: [rows, 1] against [rows, 3]."""

    features = ("x", "amount")

    def build_model(self):
        return dense()

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        error = batch["amount"][:, None] - outputs
        quantiles = tf.constant([0.1, 0.5, 0.9], error.dtype)
        return tf.reduce_sum(tf.maximum(quantiles * error, (quantiles - 1) * error), axis=1)


class Distillation(Case):
    """A student learns the softened predictions of a fixed teacher (Keras: distillation)."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.teacher = dense(layers.Dropout(0.5))
            self.teacher.build((None, 6))

    def per_example_loss(self, batch, outputs):
        teacher = tf.stop_gradient(self.teacher(batch["x"], training=False))
        soft = tf_keras.losses.kl_divergence(tf.nn.softmax(teacher / 3), tf.nn.softmax(outputs / 3))
        return 0.3 * super().per_example_loss(batch, outputs) + 0.7 * 9 * soft


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


class NoiseContrastive(SampledSoftmax):
    def per_example_loss(self, batch, outputs):
        vectors, table, bias = (tf.cast(x, tf.float32) for x in outputs)
        words = tf.cast(batch["tokens"][:, :1], tf.int64)
        return tf.nn.nce_loss(table, bias, words, vectors, 3, 11)


class WordVectors(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(11, 3)
        self.table = self.add_weight("table", (11, 3))
        self.bias = self.add_weight("bias", (11,), initializer="zeros")

    def call(self, tokens):
        vectors = tf.reduce_mean(self.embedding(tokens[:, 1:]), axis=1)
        return vectors, tf.identity(self.table), tf.identity(self.bias)


class ArithmeticUnit(layers.Layer):
    """NALU: a gated sum and product (Trask et al. 2018)."""

    def build(self, input_shape):
        shape = (int(input_shape[-1]), 4)
        self.w, self.m, self.g = (self.add_weight(name, shape) for name in ("w", "m", "g"))

    def call(self, x):
        weights = tf.tanh(self.w) * tf.sigmoid(self.m)
        product = tf.exp(tf.matmul(tf.math.log(tf.abs(x) + 1e-7), weights))
        gate = tf.sigmoid(tf.matmul(x, self.g))
        return gate * tf.matmul(x, weights) + (1 - gate) * product


class ArithmeticUnitCase(Case):
    def build_model(self):
        return dense(ArithmeticUnit())


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
        self.logs = self.add_weight("logs", (2,), initializer="zeros")

    def call(self, x):
        hidden = self.hidden(x)
        return self.first(hidden), self.second(hidden), tf.identity(self.logs)


@tf.custom_gradient
def reverse_gradient(x):
    return tf.identity(x), lambda upstream: -upstream


class DomainAdversarial(Case):
    """A reversed gradient for the domain, which here is the sign of a feature."""

    def build_model(self):
        return TwoTasks()

    def per_example_loss(self, batch, outputs):
        logits, domain, _ = outputs
        label = tf.cast(batch["x"][:, 0] > 0, domain.dtype)
        reversed_domain = reverse_gradient(domain[:, 0])
        adversarial = tf.nn.sigmoid_cross_entropy_with_logits(label, reversed_domain)
        return super().per_example_loss(batch, logits) + adversarial


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
