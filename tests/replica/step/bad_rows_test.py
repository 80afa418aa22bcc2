"""A step that fails names the rows that make it fail."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.errors import NonFiniteStep, UsageError
from tests.support import one_batch

COUNT, BAD = 16, 11
X = np.random.RandomState(0).randn(COUNT, 3)
LABELS = np.arange(COUNT) % 3


class Classifier(one_batch.Trainer):
    x, labels = X, LABELS

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(3)])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": self.x, "label": self.labels})

    def per_example_loss(self, batch, outputs):
        loss = tf_keras.losses.sparse_categorical_crossentropy
        return loss(batch["label"], outputs, from_logits=True)


def changed(values, value):
    values = values.copy()
    values[BAD] = value
    return values


class Divides(Classifier):
    x = changed(X, 0.0)

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, outputs) / tf.abs(batch["x"][:, 0])


class DatasetOfNaN(Classifier):
    def build_dataset(self, split, input_context):
        x = changed(X, np.nan)
        return tf.data.Dataset.from_tensor_slices({"x": x, "label": self.labels})


@pytest.mark.parametrize(
    ("cls", "replicas", "place"),
    [
        (type("NaN", (Classifier,), {"x": changed(X, np.nan)}), 4, "example 11"),
        (Divides, 1, "example 11"),
        (Divides, 2, "example 11"),
        (DatasetOfNaN, 1, "row 11"),
    ],
)
def test_rows_that_are_not_finite_by_themselves_are_named(cls, replicas, place):
    trainer = one_batch.make(cls, COUNT, replicas)
    with pytest.raises(NonFiniteStep) as error:
        trainer.train(tf.constant(2))
    line = f"on the {place}, whose own features or loss are not finite."
    assert line in str(error.value)


def test_all_examples_are_listed_if_none_is_worse_than_the_others():
    class Huge(Classifier):
        def per_example_loss(self, batch, outputs):
            return super().per_example_loss(batch, outputs) * np.inf

    with pytest.raises(NonFiniteStep, match=r"on the examples (\d+, ){8}\.\.\.\. No"):
        one_batch.make(Huge, COUNT, 1).train(tf.constant(1))


@pytest.mark.parametrize("replicas", [1, 4])
def test_label_that_is_no_class_is_named_with_its_example(replicas):
    cls = type("Wrong", (Classifier,), {"labels": changed(LABELS, 7)})
    trainer = one_batch.make(cls, 8, replicas)
    with pytest.raises(UsageError) as error:
        trainer.train(tf.constant(2))
    line = "The label of example 11 is 7, outside of the classes 0 to 2 that the outputs have: "
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
