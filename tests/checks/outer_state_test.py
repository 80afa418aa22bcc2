"""What code around a step assigns from rows, and what it updates by itself, is named."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
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
        (Baseline, "assigns outside of the step what its updates read"),
        (BaselineBefore, "assigns outside of the step what its updates read"),
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


def centre(features):
    return features - tf.reduce_mean(features, axis=0)


def scale(features):
    return features / tf.reduce_sum(features**2, axis=1, keepdims=True)


class Unchanged(tf_keras.layers.Layer):
    def call(self, inputs, training):
        return inputs


def number():
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)


@pytest.fixture
def own_loop():
    """Returns a loop that runs a step in its own strategy.run, and calls a function before and after."""

    def run(
        before=lambda features: features,
        after=lambda result, batch: result.loss,
        layer=Unchanged,
    ):
        strategy = testing.make_strategy(2)
        with strategy.scope():
            baseline = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)
            norm = layer()
            norm.build([None, 2])
        step = ctl.Step(
            lambda: tf_keras.Sequential([tf_keras.layers.Dense(1, use_bias=False)]),
            tf_keras.optimizers.SGD,
            lambda batch, outputs: (outputs[:, 0] - batch["label"] - baseline) ** 2,
            global_batch_size=4, strategy=strategy,
        )  # fmt: skip
        data = {
            "x": np.arange(8.0, dtype="f4").reshape(4, 2) + 1,
            "label": np.arange(4, dtype="f4"),
        }

        def replica(batch):
            features = norm(before(batch["x"]), training=True)
            result = step({"x": features, "label": batch["label"]})
            baseline.assign(after(result, batch))

        @tf.function
        def train(batch):
            strategy.run(replica, args=(batch,))

        dataset = tf.data.Dataset.from_tensor_slices(data).batch(4)
        batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
        step.build(batch)
        train(batch)
        return step.results()

    return run


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        ({"before": centre}, "may combine rows of a replica (Mean) before the step gets the rows"),
        ({"layer": tf_keras.layers.BatchNormalization}, "may combine rows of a replica (Mean)"),
        ({"before": lambda x: x[::-1]}, "may combine rows of a replica (StridedSlice)"),
        ({"before": lambda x: x + tf.random.normal(tf.shape(x))}, "draws random numbers"),
        ({"before": lambda x: x * (1.0 + number())}, "uses the number of the replica"),
        ({"before": lambda x: x * tf.cast(tf.shape(x)[0], x.dtype)}, "may use the number of rows"),
        ({"after": lambda _, batch: tf.reduce_mean(batch["label"])}, "assigns outside of the step"),
    ],
)
def test_what_a_replica_computes_around_a_step_is_named(calls, line, own_loop, caplog):
    own_loop(**calls)
    (message,) = (each for each in caplog.messages if line in each)
    assert message.startswith("tests/checks/outer_state_test.py:")


def test_rows_that_are_changed_alone_and_losses_of_all_cause_no_line(own_loop, caplog):
    own_loop(before=scale)
    assert not caplog.messages
