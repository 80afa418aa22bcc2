"""Forward pass, backward pass and accumulation on one replica."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.data.source import MaskedBatch
from ctl.replica.arithmetic import row_mask
from ctl.replica.step.microbatches import Inputs, MicroBatches, row_count, unpack
from tests.support import reference_model

# y = w x with w = 1 and squared errors, 5 rows of which the last is padding. Errors y - w x are
# 1, 2, 0, 2; gradients -2 x (y - w x) are -2, -4, 0, -12; the weight of the global batch is 8.
X, Y, MASK = [1.0, 1.0, 2.0, 3.0, 9.0], [2.0, 3.0, 2.0, 5.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0]


def compute(count, *, keep_shards=False, loss_scale=None, regularization=lambda: [], seen=None):
    w = tf.Variable(1.0)

    def forward(batch):
        if seen is not None:
            seen.append(row_mask.current())
        return tf.cast(w * batch["x"], tf.float32)

    micro_batches = MicroBatches(
        count=count,
        loss_fn=lambda batch, outputs: tf.square(batch["y"] - outputs),
        forward=forward,
        regularization=(lambda: [3.0 * w]) if regularization == "three w" else regularization,
        variables=[w],
        dtype=tf.float32,
        keep_shards=keep_shards,
        calls={},
    )
    mask = tf.constant(MASK)
    batch = {"x": tf.constant(X), "y": tf.constant(Y)}
    scale = None if loss_scale is None else tf.constant(loss_scale)
    inputs = Inputs(
        batch, mask, {"": mask}, {"": tf.constant(8.0)}, tf.constant(10), tf.constant(7), scale
    )
    return micro_batches(inputs)


def test_contributions_of_three_micro_batches_by_hand():
    # Rows 0 | 1, 2 | 3 and padding: losses 1 | 4 + 0 | 4, each divided by 8.
    shards = compute(3, keep_shards=True)
    assert [float(value) for value in shards.losses] == [1 / 8, 4 / 8, 4 / 8]
    assert [float(g) for (g,) in shards.gradients] == [-2 / 8, -4 / 8, -12 / 8]
    summed = compute(3)
    assert [float(value) for value in summed.losses] == [9 / 8]
    assert [[float(g) for g in gradients] for gradients in summed.gradients] == [[-18 / 8]]
    rows = [part.batch["x"].numpy().tolist() for part in summed.micro_batches]
    assert rows == [[1.0], [1.0, 2.0], [3.0, 9.0]]
    masks = [part.row_mask.numpy().tolist() for part in summed.micro_batches]
    assert masks == [[1], [1, 1], [1, 0]]
    assert [part.outputs.numpy().tolist() for part in summed.micro_batches] == rows


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_sum_does_not_depend_on_the_number_of_micro_batches(count):
    contributions = compute(count, regularization="three w")
    # The regularization 3 w is in the sum once.
    assert float(contributions.losses[0]) == pytest.approx(9 / 8 + 3, abs=1e-6)
    assert float(contributions.gradients[0][0]) == pytest.approx(-18 / 8 + 3, abs=1e-6)


def test_loss_scale_multiplies_the_gradients_and_not_the_loss():
    contributions = compute(2, loss_scale=16.0)
    assert float(contributions.losses[0]) == 9 / 8
    assert float(contributions.gradients[0][0]) == -18 * 16 / 8


def test_each_micro_batch_knows_its_first_row_and_step():
    seen = []
    compute(3, seen=seen)
    assert [int(rows.first_row) for rows in seen] == [10, 11, 13]
    assert {int(rows.step) for rows in seen} == {7}


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
