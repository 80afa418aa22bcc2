"""How a step unpacks its batches. tests/trainer_test.py compares the update of micro-batches by hand."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.data.source import MaskedBatch
from ctl.update.microbatches import row_count, unpack
from tests.support import reference_model


def test_row_count_is_an_int_if_the_shape_is_static():
    assert row_count({"x": tf.zeros([3, 2])}) == 3

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def count(x):
        rows = row_count({"x": x})
        assert tf.is_tensor(rows)
        return rows

    assert int(count(tf.zeros([5, 2]))) == 5


def test_elements_with_and_without_a_mask_are_unpacked():
    batch, mask = {"label": np.zeros(2)}, np.ones(2, np.float32)
    assert unpack((batch, mask)) == (batch, mask)
    assert unpack(batch) == (batch, None)
    batch = {"x": np.zeros(2)}  # of an input pipeline: without a label
    assert unpack(MaskedBatch(batch, mask)) == (batch, mask)


def test_tuples_of_a_users_own_dataset_are_unpacked_as_tf_keras_does():
    x, label, weight = np.zeros(2), np.ones(2), np.ones(2)
    assert unpack((x, label)) == ({"x": x, "label": label}, None)
    assert unpack(({"a": x}, label, weight)) == ({"a": x, "label": label, "weight": weight}, None)
    targets = {"a": label, "b": label}
    assert unpack(({"x": x}, targets)) == ({"x": x, "label": targets}, None)
    assert unpack(({"x": x}, None)) == ({"x": x}, None)
    assert unpack(({"weight": x}, label)) == ({"x/weight": x, "label": label}, None)


@pytest.mark.parametrize(
    ("features", "values"), [("a", np.ones(2, np.float32)), ("label", np.array([1, 2]))]
)
def test_tensor_that_may_be_the_labels_or_the_mask_is_rejected(features, values):
    for second in (values, tf.constant(values)):
        with pytest.raises(ctl.UsageError, match='put the labels into the dict as "label"'):
            unpack(({features: np.zeros(2)}, second))


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (lambda self, batch, outputs: tf.reshape(outputs, [-1]), "24 losses for 8 examples"),
        (lambda self, batch, outputs: None, r"microbatches_test.py:\d+\) returned None"),
    ],
)
def test_losses_that_are_not_those_of_the_rows_are_rejected(losses, message):
    cls = type("Wrong", (reference_model.ReferenceTrainer,), {"per_example_loss": losses})
    with pytest.raises(ctl.UsageError, match=message):
        reference_model.make_trainer(testing.make_strategy(1), 8, cls=cls).train(tf.constant(1))
