"""Metrics that users define, and random layers in evaluation."""

import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, Case

layers = tf_keras.layers


class F1(tf_keras.metrics.Metric):
    """The mean F1 over the classes, from counts (Keras' guide: a metric of one's own)."""

    def __init__(self):
        super().__init__(name="f1")
        for name in ("hits", "predicted", "actual"):
            setattr(self, name, self.add_weight(name, (CLASSES,), initializer="zeros"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        actual = tf.one_hot(tf.reshape(tf.cast(y_true, tf.int32), [-1]), CLASSES, dtype=self.dtype)
        predicted = tf.one_hot(tf.argmax(y_pred, axis=-1), CLASSES, dtype=self.dtype)
        if sample_weight is not None:
            weight = tf.cast(sample_weight, self.dtype)[:, None]
            actual, predicted = actual * weight, predicted * weight
        self.hits.assign_add(tf.reduce_sum(actual * tf.cast(predicted > 0, self.dtype), axis=0))
        self.predicted.assign_add(tf.reduce_sum(predicted, axis=0))
        self.actual.assign_add(tf.reduce_sum(actual, axis=0))

    def reset_state(self):
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))

    def result(self):
        return tf.reduce_mean(tf.math.divide_no_nan(2 * self.hits, self.predicted + self.actual))


class CustomMetric(Case):
    def build_metrics(self):
        return {"f1": F1(), "accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}
