"""Variables that a step assigns, and counters."""

import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, Case, dense
from tests.users_code.pairs import Embedding

layers = tf_keras.layers


def follow(slow, fast):
    """Moves the variables of a model towards those of another one."""
    for variable, value in zip(slow.variables, fast.variables, strict=True):
        variable.assign(0.9 * variable + 0.1 * value)


class MomentumQueue(Embedding):
    """Keys of a slowly moving encoder, in a queue that each step fills with its rows (MoCo)."""

    length = 21

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.key_model = self.build_model()
            self.key_model.build((None, 6))
            self.model.build((None, 6))
            self.key_model.set_weights(self.model.get_weights())
            start = tf.random.stateless_normal([self.length, 4], [1, 2], dtype=tf.float64)
            self.queue = tf.Variable(tf.math.l2_normalize(start, axis=1), trainable=False)

    def losses(self, batch):
        queries = tf.math.l2_normalize(self.model(batch["x"], training=True), axis=1)
        keys = tf.math.l2_normalize(self.key_model(batch["view"]), axis=1)
        positive = tf.reduce_sum(queries * tf.stop_gradient(keys), axis=1, keepdims=True)
        negative = tf.matmul(queries, self.queue, transpose_b=True)
        logits = tf.concat([positive, negative], axis=1) / 0.5
        labels = tf.zeros(tf.shape(logits)[:1], tf.int32)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)

    def replica_step(self, batch):
        loss = self.minimize(batch, self.losses)
        follow(self.key_model, self.model)
        keys = tf.math.l2_normalize(self.key_model(batch["view"]), axis=1)
        self.queue.assign(tf.concat([keys, self.queue], axis=0)[: self.length])
        return loss


class Bootstrap(Embedding):
    """BYOL: predicts the other view's projection by a slowly moving network."""

    def build_model(self):
        self.target = super().build_model()
        self.target.build((None, 6))
        online = super().build_model()
        return tf_keras.Sequential([online, layers.Dense(4)])

    def losses(self, batch):
        predicted = self.model(batch["x"], training=True)
        target = tf.stop_gradient(self.target(batch["view"]))
        predicted, target = (tf.math.l2_normalize(z, axis=1) for z in (predicted, target))
        return 2 - 2 * tf.reduce_sum(predicted * target, axis=1)

    def replica_step(self, batch):
        loss = self.minimize(batch, self.losses)
        follow(self.target, self.model.layers[0])
        return loss


class CenterLoss(Case):
    """Centres of the classes, moved in each step towards the mean of the batch's rows."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.centers = tf.Variable(tf.zeros([CLASSES, CLASSES], tf.float64), trainable=False)

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        difference = tf.stop_gradient(tf.gather(self.centers, batch["label"])) - outputs
        sums = tf.math.unsorted_segment_mean(difference, batch["label"], CLASSES)
        self.centers.assign_sub(0.5 * sums)
        return losses + 0.1 * tf.reduce_sum(difference**2, axis=1)


class MeanAggregatedStatistic(layers.Layer):
    """A running mean over the rows, in a variable with aggregation MEAN, as the guide advises."""

    def build(self, input_shape):
        self.mean = self.add_weight(
            "mean", (int(input_shape[-1]),), initializer="zeros", trainable=False,
            aggregation=tf.VariableAggregation.MEAN, synchronization=tf.VariableSynchronization.ON_READ,
        )  # fmt: skip

    def call(self, x, training=None):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, axis=0))
        return x - self.mean


class MeanAggregatedStatisticCase(Case):
    def build_model(self):
        return dense(MeanAggregatedStatistic())


class PythonCounter(Case):
    """A curriculum by a counter in Python, which counts traces and not steps."""

    calls = 0

    def per_example_loss(self, batch, outputs):
        self.calls += 1
        return min(1.0, self.calls / 10) * super().per_example_loss(batch, outputs)


class CountingVariable(Case):
    """A curriculum by a variable that the step increments (Keras: AdaMatch)."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.current_step = tf.Variable(0, dtype=tf.int64, trainable=False)

    def per_example_loss(self, batch, outputs):
        self.current_step.assign_add(1)
        share = tf.minimum(tf.cast(self.current_step, tf.float64) / 10, 1)
        return share * super().per_example_loss(batch, outputs)
