"""The shapes of a metric's tensors show whether it is a sum over rows."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.replica.checks.metric_rows import check_rows

WRAPPER = tf_keras.metrics.MeanMetricWrapper


def check(metric, labels=(5, 1), outputs=(5, 1)):
    with tf.Graph().as_default():
        check_rows(metric, {"labels": tf.ones(labels), "outputs": tf.ones(outputs)}, "m")


def hits(labels, outputs):
    return tf.equal(tf.cast(labels, tf.int64), tf.argmax(outputs, -1))


@pytest.mark.parametrize(
    ("function", "labels", "outputs"),
    [
        (lambda labels, outputs: labels - outputs, (5, 1), (5, 1)),
        (lambda labels, outputs: tf.reduce_mean(outputs, [1, 2]), (5,), (5, 2, 3)),
        (lambda labels, outputs: outputs[labels[:, 0] > 0], (5, 1), (5, 3)),
        (hits, (5, 4), (5, 4, 3)),
        (tf_keras.metrics.mean_squared_error, (5,), (5,)),
    ],
)
def test_values_per_row_are_accepted(function, labels, outputs):
    check(WRAPPER(function), labels, outputs)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, y: tf.reduce_sum(y), r"returned shape \[\] for labels \[rows, 1\]"),
        (
            lambda x, y: tf.reduce_sum(y, 0),
            r"returned shape \[3\] for labels \[rows, 1\] and outputs \[rows, 3\]",
        ),
        (hits, r"compares all rows with each other \(operation Equal returns \[rows, rows\]\)"),
        (
            lambda x, y: tf.reduce_sum(x - y[:, 0]),
            r"compares all rows with each other \(operation Sub returns \[rows, rows\]\)",
        ),
    ],
)
def test_other_values_are_rejected(function, message):
    with pytest.raises(ctl.UsageError, match=message):
        check(WRAPPER(function), (5, 1), (5, 3))


class Multiplied(tf_keras.metrics.Metric):
    def update_state(self, labels, outputs, sample_weight=None):
        errors = tf.abs(labels - outputs)
        tf.reduce_sum(errors if sample_weight is None else errors * sample_weight)

    def result(self):
        return 0.0


def test_metric_is_traced_with_the_weights_that_it_gets():
    metric = Multiplied()
    check(metric)
    message = (
        r"operation Mul returns \[rows, rows\]\) for labels \[rows, 1\] and outputs \[rows, 1\] "
        r"and sample_weight \[rows\]:"
    )
    with pytest.raises(ctl.UsageError, match=message), tf.Graph().as_default():
        values = {"labels": tf.ones([5, 1]), "outputs": tf.ones([5, 1])}
        check_rows(metric, {**values, "sample_weight": tf.ones([5])}, "m")


def test_metric_of_tf_keras_is_not_traced():
    metric = tf_keras.metrics.AUC()
    metric.update_state = None
    check(metric)


def test_error_of_the_users_code_is_left_to_the_update():
    def fail(labels, outputs):
        raise ZeroDivisionError

    check(WRAPPER(fail))
