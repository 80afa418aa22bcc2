"""A mean that a library returns is weighted by its rows, on any number of replicas."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing

X = np.random.default_rng(0).normal(size=[14, 3])
Y = np.random.default_rng(1).normal(size=[14, 2])
WEIGHTS = np.random.default_rng(2).uniform(0.5, 2, size=[14])


def library_mean(label, outputs):
    """A mean over rows, whose rows are not linear in the error."""
    spectrum = tf.signal.rfft(tf.cast(outputs - label, tf.float32))
    return tf.reduce_mean((outputs - label) ** 2) + 0 * tf.cast(
        tf.reduce_mean(tf.abs(spectrum)), outputs.dtype
    )


def library_loss(batch, outputs):
    return library_mean(batch["label"], outputs)


def build_model():
    return tf_keras.Sequential([tf_keras.layers.Dense(2, "tanh", kernel_initializer="ones")])


def train(replicas, loss_fn=library_loss, rows=7, weighted=False, **options):
    step = ctl.Step(
        build_model, lambda: tf_keras.optimizers.SGD(0.1), loss_fn, precision="float64",
        global_batch_size=rows, strategy=testing.make_strategy(replicas), **options,
    )  # fmt: skip
    data = {"x": X, "label": Y} | ({"weight": WEIGHTS} if weighted else {})
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(rows)
    for batch in step.strategy.experimental_distribute_dataset(dataset):
        loss = step(batch).loss
    return step.model.get_weights()[0], float(step.strategy.experimental_local_results(loss)[0])


def plain(loss=library_mean, rows=7, weighted=False):
    """TensorFlow's own loop on one device."""
    model, optimizer = build_model(), tf_keras.optimizers.SGD(0.1)
    tf_keras.backend.set_floatx("float64")
    try:
        model.build([None, 3])
        for start in range(0, 14, rows):
            x, y, w = (v[start : start + rows] for v in (X, Y, WEIGHTS))
            with tf.GradientTape() as tape:
                if weighted:
                    losses = tf.reduce_mean((model(x) - y) ** 2, axis=1)
                    value = tf.reduce_sum(w * losses) / w.sum()
                else:
                    value = loss(y, model(x))
            pairs = zip(tape.gradient(value, model.variables), model.variables, strict=True)
            optimizer.apply_gradients(pairs)
    finally:
        tf_keras.backend.set_floatx("float32")
    return model.get_weights()[0], float(value)


@pytest.mark.parametrize(("replicas", "rows"), [(1, 7), (2, 7), (4, 7), (4, 5), (2, 14)])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_of_rows_is_that_of_the_global_batch(replicas, rows, weighted, caplog):
    got = train(replicas, loss="mean", rows=rows, weighted=weighted, micro_batches=1 + (rows == 14))
    want = plain(rows=rows, weighted=weighted)
    np.testing.assert_allclose(got[0], want[0], atol=1e-10)
    np.testing.assert_allclose(got[1], want[1], atol=1e-10)
    assert not [each.message for each in caplog.records if "rows" in each.message]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("losses", [tf_keras.losses, keras.losses])
def test_a_loss_object_of_keras_is_its_mean(replicas, losses):
    got = train(replicas, losses.MeanSquaredError())
    np.testing.assert_allclose(got[0], plain()[0], atol=1e-10)
    with pytest.raises(ctl.UsageError, match="reduction='sum'"):
        train(1, losses.MeanSquaredError(reduction="sum"))


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda y, z: tf.reduce_sum((y - z) ** 2), "no mean of rows"),
        (lambda y, z: tf.sqrt(tf.reduce_mean((y - z) ** 2)), "no mean of rows"),
        (lambda y, z: tf.reduce_max((y - z) ** 2), "no mean of rows"),
        (lambda y, z: (y - z)[:, 0] ** 2, r"returned shape \(1,\), but must be the mean"),
    ],
)
def test_what_is_no_mean_of_rows_is_one_line(wrong, found):
    with pytest.raises(ctl.UsageError, match=found) as error:
        train(2, lambda batch, outputs: wrong(batch["label"], outputs), loss="mean")
    assert "\n" not in str(error.value)


def test_masked_mean_is_rejected_in_the_step_whose_mask_leaves_out_a_row():
    def masked(batch, outputs):
        keep = tf.cast(batch["label"][:, 0] != Y[12, 0], outputs.dtype)  # of the last batch
        errors = tf.reduce_mean((batch["label"] - outputs) ** 2, axis=1)
        return tf.reduce_sum(errors * keep) / tf.maximum(tf.reduce_sum(keep), 1)

    with pytest.raises(ctl.UsageError, match="no mean of rows"):
        train(1, masked, rows=4, loss="mean")


def test_rows_that_are_combined_before_the_function_are_named():
    def loss_fn(batch, outputs):
        return ctl.replica.mean_of_rows(
            library_mean, batch["label"], outputs - tf.reduce_mean(outputs, axis=0)
        )

    with pytest.raises(ctl.UsageError, match="combines rows of the same replica"):
        train(2, loss_fn)


class Trainer(ctl.StandardTrainer):
    def build_model(self):
        return tf_keras.Sequential(
            [tf_keras.layers.Dense(2, kernel_initializer="ones", input_shape=[3])]
        )

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": X[:7], "label": Y[:7]})

    def per_example_loss(self, batch, outputs):
        return ctl.replica.mean_of_rows(library_mean, batch["label"], outputs)


@functools.cache
def trained(replicas, xla="off"):
    trainer = Trainer(
        global_batch_size=7, optimizer=lambda: tf_keras.optimizers.SGD(0.1),
        strategy=testing.make_strategy(replicas),
        options=ctl.TrainerOptions(precision="float64", xla=xla),
    )  # fmt: skip
    trainer.train(tf.constant(3))
    return trainer.model.get_weights()[0]


@pytest.mark.parametrize(("replicas", "xla"), [(2, "off"), (4, "off"), (1, "step")])
def test_a_trainer_with_padding_computes_the_mean(replicas, xla):
    np.testing.assert_allclose(trained(replicas, xla), trained(1), atol=1e-10)
