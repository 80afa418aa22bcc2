"""What is left of another loop in the losses is one line: penalties, and the batch size."""

import pytest
import tensorflow as tf
import tf_keras

import ctl

BATCH = 8
ERRORS = {
    "penalties": ("adds model.losses", lambda x, model: x + tf.add_n(model.losses)),
    "sum": ("adds model.losses", lambda x, model: x + sum(model.losses)),
    "division": ("divides the losses by 8", lambda x, model: x / BATCH),
    "factor": ("divides the losses by 8", lambda x, model: 2.0 * x * (1 / BATCH)),
}
RIGHT = {"half": lambda x: 0.5 * x, "of features": lambda x: tf.sqrt(x / BATCH + 1.0)}


def train(loss, regularizer="l2"):
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(2, kernel_regularizer=regularizer, input_shape=[3])]
    )

    def loss_fn(batch, outputs):
        return loss(tf.reduce_sum(outputs**2, axis=1), model)

    step = ctl.Step(model, tf_keras.optimizers.SGD(0.1), loss_fn, global_batch_size=BATCH)
    step({"x": tf.ones([BATCH, 3])})


@pytest.mark.parametrize("name", ERRORS)
def test_rest_of_another_loop_is_one_line(name, caplog):
    message, loss = ERRORS[name]
    train(loss)
    (line,) = [each for each in caplog.messages if message in each]
    assert "ported_losses_test.py" in line
    assert "\n" not in line


@pytest.mark.parametrize("name", RIGHT)
def test_other_factors_are_no_mistake(name, caplog):
    train(lambda x, model: RIGHT[name](x))
    assert not caplog.messages
