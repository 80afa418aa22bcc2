"""The checks of the user's code accept every form of a graph, and one that fails says so in one line."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.checks.row_coupling import RowCoupling


@tf.function
def inner(x):
    return tf.cond(tf.reduce_sum(x[:1]) > 1e9, lambda: x, lambda: tf.tanh(x))


@tf.function
def nested(x):
    return inner(x) * 2.0


def of_loops(x):
    """A loop of a tensor's length, a scan over the features, and a branch of a number."""
    for _ in tf.range(tf.shape(x)[1]):
        x = 0.5 * inner(x)
    features = tf.scan(lambda total, each: 0.5 * total + each, tf.transpose(x))
    branches = [lambda: features[-1], lambda: 2.0 * features[-1]]
    return tf.switch_case(tf.shape(x)[1] - 1, branches)


def with_forms(batch, outputs):
    """Losses whose gradients by the features are a part of them, through each form of control flow."""
    x = batch["x"]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        values = [tf.reduce_sum(nested(x), axis=1), of_loops(x)]
        values.append(tf.map_fn(lambda row: tf.reduce_sum(nested(row[None])), x))
    gradients = [tape.gradient(value, x) for value in values]
    kept = tf.boolean_mask(outputs[:, 0], tf.reduce_all(tf.math.is_finite(x), axis=1))
    return (
        kept**2 + tf.add_n([tf.reduce_sum(each**2, axis=1) for each in gradients]) * outputs[:, 0]
    )


def train(replicas, loss_fn):
    rows = {"x": np.linspace(-1.0, 1.0, 10).reshape(5, 2).astype(np.float32)}
    step = ctl.Step(
        lambda: tf_keras.Sequential([tf_keras.layers.Dense(1, kernel_initializer="ones")]),
        lambda: tf_keras.optimizers.SGD(0.1), loss_fn, global_batch_size=5,
        strategy=testing.make_strategy(replicas),
    )  # fmt: skip
    data = tf.data.Dataset.from_tensor_slices(rows).batch(5)
    for batch in step.strategy.experimental_distribute_dataset(data):
        step(batch)
    return step.model.get_weights()


@pytest.mark.slow
def test_checks_read_functions_conditionals_loops_and_losses_of_no_fixed_number(caplog):
    one, two = train(1, with_forms), train(2, with_forms)
    np.testing.assert_allclose(two[0], one[0], rtol=1e-5)
    assert "cannot check" not in caplog.text


def test_check_that_fails_is_one_line_and_the_step_trains(monkeypatch, caplog):
    def search(self, operations, rows):
        raise ValueError("zip() argument 2 is longer\nthan argument 1")

    monkeypatch.setattr(RowCoupling, "search", search)
    train(1, lambda batch, outputs: outputs[:, 0] ** 2)
    (line,) = [each for each in caplog.messages if "cannot check" in each]
    assert "ValueError: zip() argument 2 is longer than argument 1" in line
    assert "\n" not in line
