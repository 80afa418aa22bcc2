"""Losses of single rows, as tutorials write them, and weights."""

import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, Case

layers = tf_keras.layers


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
