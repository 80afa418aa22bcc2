"""What code around a step assigns from rows, and what it updates by itself, is named."""

import pytest
import tensorflow as tf

from tests.users_code.examples import Case
from tests.users_code.running import Split, train


class Baseline(Case):
    """Subtracts a mean of means, which a loop of the user's own computes."""

    def build_model(self):
        self.baseline = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, outputs - self.baseline)

    def train_step(self, iterator):
        batch = next(iterator)
        means = self.strategy.run(lambda rows: tf.reduce_mean(rows[0]["x"]), args=(batch,))
        super().train_step(iter([batch]))
        self.baseline.assign(self.strategy.reduce("MEAN", means, axis=None))


class BaselineBefore(Baseline):
    def train_step(self, iterator):
        batch = next(iterator)
        means = self.strategy.run(lambda rows: tf.reduce_mean(rows[0]["x"]), args=(batch,))
        self.baseline.assign(self.strategy.reduce("MEAN", means, axis=None))
        Case.train_step(self, iter([batch]))


class Clock(Baseline):
    """Assigns a number that no row has."""

    def train_step(self, iterator):
        self.baseline.assign(0.5 * self.baseline + 0.1)
        Case.train_step(self, iterator)


class OwnLoop(Case):
    """Computes the update as Orbit's examples do."""

    def train_step(self, iterator):
        def step(rows):
            batch, _ = rows
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.per_example_loss(batch, self.forward(batch, True)))
            variables = self.model.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

        self.strategy.run(step, args=(next(iterator),))


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (Baseline, "assigns outside of the step what its losses read"),
        (BaselineBefore, "assigns outside of the step what its losses read"),
        (OwnLoop, "train_step updates the model itself"),
    ],
)
def test_code_around_the_step_that_is_not_compared_is_named_once(case, line, caplog):
    train(case, Split(2, 7))
    (message,) = caplog.messages
    assert line in message


def test_number_that_is_no_function_of_the_rows_is_assigned_without_a_line(caplog):
    train(Clock, Split(2, 7))
    assert not caplog.messages
