"""A replica or micro-batch without rows contributes its penalty and nothing else."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.testing import tiny
from ctl.update.empty_batches import pad_rows, zero_without_rows
from tests.support import reference_model

L = tf_keras.layers


class Convolutions(tiny.TinyTrainer):
    """Global batches of 5 rows and of 1; the outputs of a row of zeros are not finite."""

    def build_model(self):
        penalty = tf_keras.regularizers.L2(0.1)
        convolutions = (
            L.Conv2D(4, 2, padding="same"),
            L.DepthwiseConv2D(2, depthwise_regularizer=penalty),
        )
        last = L.Dropout(0.4), L.GlobalAveragePooling2D(), L.Dense(3)
        return tf_keras.Sequential([L.Input((3, 3, 2)), *convolutions, *last])

    def build_dataset(self, split, input_context):
        draw = np.random.default_rng(0)
        examples = {"x": draw.uniform(0.1, 2, [6, 3, 3, 2]), "label": draw.integers(0, 3, 6)}
        return ctl.data.GlobalBatches(tf.data.Dataset.from_tensor_slices(examples).batch(5))

    def preprocess(self, batch):
        return {**batch, "x": tf.math.log(tf.cast(batch["x"], self.compute_dtype))}

    def build_metrics(self):
        return {"mean": tf_keras.metrics.Mean()}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["mean"].update_state(tf.reduce_sum(outputs, 1), weights)


def make(cls, replicas, **options):
    optimizer = lambda: tf_keras.optimizers.SGD(0.1)  # noqa: E731
    return reference_model.make_trainer(
        testing.make_strategy(replicas), 5, cls=cls, optimizer=optimizer, **options
    )


def train(replicas, micro_batches):
    trainer = make(Convolutions, replicas, micro_batches=micro_batches)
    outputs = trainer.train(tf.constant(2))
    variables = [testing.copies(trainer.strategy, v) for v in trainer.model.variables]
    return [float(outputs[name]) for name in ("loss", "mean")], variables


@pytest.mark.slow
def test_update_of_a_partial_batch_of_images_is_that_of_one_replica():
    """The second batch has rows in the first micro-batch of the first replica alone."""
    expected_outputs, expected = train(1, 1)
    outputs, variables = train(2, 2)
    assert outputs == pytest.approx(expected_outputs, abs=1e-12)
    for copies, [value] in zip(variables, expected, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-12)


class Collecting(Convolutions):
    """Has batch normalization, which TensorFlow merges into the convolution before it in evaluations."""

    def build_model(self):
        model = super().build_model()
        first = [model.layers[0], L.BatchNormalization(), L.ReLU()]
        return tf_keras.Sequential([L.Input((3, 3, 2)), *first, *model.layers[1:]])

    def collect_outputs(self, batch, outputs):
        return {"outputs": outputs}

    def compute_metrics(self, outputs):
        return {"rows": len(outputs["outputs"]), "total": outputs["outputs"].sum()}


def evaluate(replicas):
    trainer = make(Collecting, replicas, precision="float32")
    results = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    return {name: float(value) for name, value in results.items()}


@pytest.mark.slow
def test_evaluation_of_a_partial_batch_of_images_is_that_of_one_replica():
    expected = evaluate(1)
    assert (expected["examples"], expected["rows"]) == (6, 6)
    assert evaluate(2) == pytest.approx(expected, rel=1e-5)


class Normalized(Convolutions):
    def build_model(self):
        normalize = functools.partial(L.BatchNormalization, momentum=0.5)
        layers = [L.Conv2D(4, 2), normalize(fused=True), L.Flatten(), normalize(), L.Dense(3)]
        return tf_keras.Sequential([L.Input((3, 3, 2)), *layers])

    def preprocess(self, batch):
        return batch


def test_moving_statistics_of_a_replica_without_rows_stay():
    """The second replica has no rows in the second global batch."""
    trainer = make(Normalized, 2, precision="float32")
    strategy = trainer.strategy
    variables = [v for v in trainer.model.variables if "moving" in v.name]
    assert len(variables) == 4

    def read():
        return [testing.copies(strategy, variable) for variable in variables]

    steps = [read()]
    for _ in range(2):
        trainer.train(tf.constant(1))
        steps.append(read())
    for old, new in zip(*steps[1:], strict=True):
        np.testing.assert_array_equal(new[1], old[1])
        assert (new[0] != old[0]).any()
    assert all(np.isfinite(copy).all() for values in steps for copies in values for copy in copies)


@pytest.mark.parametrize(
    ("rows", "padded", "mask"),
    [(0, [0, 0], [0, 0]), (1, [5, 5], [1, 0]), (3, [5, 6, 7], [1, 1, 1])],
)
def test_padding_repeats_the_last_row_or_is_zero(rows, padded, mask):
    x = tf.constant([5, 6, 7][:rows], tf.int32)
    names = tf.constant(["a", "b", "c"][:rows], tf.string)
    batch, row_mask = pad_rows({"x": x, "name": names}, None, tf.constant(rows), least=2)
    assert batch["x"].numpy().tolist() == padded
    assert len(batch["name"]) == len(padded)
    assert row_mask.numpy().tolist() == mask


def test_padding_extends_a_mask():
    batch = {"x": tf.constant([5.0])}
    _, row_mask = pad_rows(batch, tf.constant([1.0]), tf.constant(1), least=3)
    assert row_mask.numpy().tolist() == [1, 0, 0]
    # A static number of rows is not padded.
    assert pad_rows(batch, None, 1, least=2) == (batch, None)


def test_gradients_without_rows_are_zero_even_if_they_are_nan():
    sparse = tf.IndexedSlices(tf.constant([[np.nan]]), tf.constant([3]), tf.constant([4, 1]))
    values = [tf.constant([np.nan, 1.0]), None, sparse]
    dense, none, zeros = zero_without_rows(values, tf.zeros([1]), tf.constant(1))
    assert dense.numpy().tolist() == [0, 0]
    assert none is None
    assert zeros.values.numpy().tolist() == [[0]]
    kept = zero_without_rows(values[:1], tf.constant([1.0, 0.0]), tf.constant(2))
    np.testing.assert_array_equal(kept[0], values[0])
