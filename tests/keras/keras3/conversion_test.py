"""Optimizers and metrics of Keras 3 become those of tf_keras, which compute the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.keras.keras3 import conversion
from tests.support.checks import one_line

OPTIMIZERS = {
    "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "Adamax": {},
    "AdamW": {"weight_decay": 0.1}, "Ftrl": {"l1_regularization_strength": 0.01}, "Lion": {},
    "RMSprop": {"momentum": 0.9, "centered": True}, "SGD": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip
CLASSES = {"num_classes": 3, "target_class_ids": [0, 2]}
# The arguments of the metrics that require some, or that have interesting ones.
ARGUMENTS = {
    "AUC": {"num_thresholds": 7, "curve": "PR"}, "F1Score": {"average": "macro"},
    "BinaryIoU": {"target_class_ids": [1]}, "IoU": CLASSES, "OneHotIoU": CLASSES,
    "MeanIoU": {"num_classes": 3}, "OneHotMeanIoU": {"num_classes": 3},
    "PrecisionAtRecall": {"recall": 0.5}, "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2}, "TopKCategoricalAccuracy": {"k": 2},
}  # fmt: skip
# Their bases, and those that tf_keras does not have.
NOT_CONVERTED = {"Metric", "MeanMetricWrapper", "ConcordanceCorrelation", "PearsonCorrelation"}
METRICS = sorted(
    name
    for name, value in vars(keras.metrics).items()
    if isinstance(value, type) and name not in NOT_CONVERTED
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_compute_the_same_updates(name):
    optimizer = getattr(keras.optimizers, name)(learning_rate=0.05, **OPTIMIZERS[name])
    converted = conversion.optimizer_of(optimizer)
    assert type(converted) is getattr(tf_keras.optimizers, name)
    start = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    one, two = keras.Variable(start), tf.Variable(start)
    for step in range(20):
        gradient = tf.sin(start * step + 1)
        optimizer.apply_gradients([(gradient, one)])
        converted.apply_gradients([(gradient, two)])
    assert np.allclose(one, two, atol=2e-6)


def test_schedules_are_converted():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100, warmup_target=0.2, warmup_steps=10)
    converted = conversion.optimizer_of(keras.optimizers.SGD(schedule))
    assert isinstance(converted._learning_rate, tf_keras.optimizers.schedules.CosineDecay)
    assert np.allclose(
        [converted._learning_rate(s) for s in (0, 5, 50)], [schedule(s) for s in (0, 5, 50)]
    )


@pytest.mark.parametrize("name", METRICS)
def test_metrics_compute_the_same_results(name):
    metric = getattr(keras.metrics, name)(**ARGUMENTS.get(name, {}))
    converted = conversion.metric_of(metric)
    labels, outputs = np.eye(3, dtype="float32"), np.float32([[5, 3, 2], [5, 2, 3], [1, 2, 7]]) / 10
    values = [labels, outputs]
    if name in ("Mean", "Sum"):
        values = [outputs]
    elif name in ("IoU", "MeanIoU"):
        values = [np.array([0, 1, 2]), np.array([0, 0, 2])]
    elif name.startswith("Sparse"):
        values = [np.array([0, 1, 2]), outputs]
    metric.update_state(*values)
    converted.update_state(*values)
    assert type(converted) is getattr(tf_keras.metrics, name)
    np.testing.assert_allclose(metric.result(), converted.result(), rtol=1e-5)


def test_what_cannot_be_converted_is_one_line():
    class Own(keras.optimizers.SGD):
        pass

    class Count(keras.metrics.Metric):
        pass

    class Constant(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1

    excluding = keras.optimizers.AdamW()
    excluding.exclude_from_weight_decay(var_names=["bias"])

    for convert, value, message in (
        (conversion.optimizer_of, Own(), "Own of keras.optimizers cannot be converted .*tf_keras"),
        (conversion.optimizer_of, keras.optimizers.Lamb(), "Lamb of keras.optimizers cannot be"),
        (conversion.optimizer_of, keras.optimizers.SGD(Constant()), "SGD of .*'Constant' must"),
        (conversion.optimizer_of, excluding, "set optimizer.weight_decay_exclude"),
        (conversion.metric_of, Count(), "Count of keras.metrics cannot be converted"),
        (
            conversion.optimizer_of,
            keras.optimizers.SGD(gradient_accumulation_steps=2),
            "set optimizer.micro_batches instead",
        ),
    ):
        with one_line(message):
            convert(value)


def test_keras_does_not_sum_the_repeated_rows_of_a_sparse_gradient():
    """The reason why optimizers are converted on one device, too; docs/prove-your-loop.md."""
    repeated = tf.IndexedSlices(
        tf.constant([[1.0], [3.0]]), tf.constant([0, 0]), tf.constant([2, 1])
    )
    one, two = keras.Variable([[0.0], [0.0]]), tf.Variable([[0.0], [0.0]])
    for _ in range(2):
        keras.optimizers.Adagrad(0.1).apply_gradients([(repeated, one)])
        tf_keras.optimizers.Adagrad(0.1).apply_gradients([(repeated, two)])
    assert abs(one.numpy()[0, 0] - two.numpy()[0, 0]) > 0.01


def test_object_that_was_converted_can_be_copied_and_made_again():
    optimizer = keras.optimizers.SGD(0.5)
    converted = conversion.optimizer_of(optimizer)
    converted.learning_rate = 0.25
    new = type(optimizer).from_config(optimizer.get_config())
    assert float(new.learning_rate) == 0.5 and int(new.iterations) == 0
    new.learning_rate = 0.125
    assert float(new.learning_rate) == 0.125 and float(optimizer.learning_rate) == 0.25
    assert float(conversion.optimizer_of(new).learning_rate) == 0.125


def test_optimizer_of_another_model_is_named():
    optimizer = keras.optimizers.Adam(0.1)
    batch = {"x": np.ones((4, 3), np.float32)}
    for is_first in (True, False):
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        step = ctl.Step(model, optimizer, lambda b, y: y[:, 0] ** 2, global_batch_size=4)
        if is_first:
            step(batch)
            continue
        with pytest.raises(ctl.UsageError, match=r"slot variables.*make an optimizer"):
            step(batch)
