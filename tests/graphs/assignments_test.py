"""Variables that the code of a step assigns are assigned once per update, or rejected."""

import re
import types

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.graphs.assignments import find_assignments
from tests.users_code import normalization, running, state
from tests.users_code.examples import Case, dense
from tests.users_code.running import Split


class UnitKernel(tf_keras.layers.Layer):
    """Assigns its kernel, which the optimizer trains, the normalized kernel."""

    def build(self, shape):
        self.kernel = self.add_weight("kernel", (int(shape[-1]), 4))

    def call(self, x):
        self.kernel.assign(self.kernel / (0.5 + tf.norm(self.kernel)))
        return tf.matmul(x, self.kernel)


class Conditional(Case):
    """Counts in a branch of the graph and in a function; one variable is averaged by tf.distribute.

    A layer assigns its kernel.
    """

    def build_model(self):
        self.counts = [tf.Variable(0, trainable=False) for _ in range(2)]
        self.mean = tf.Variable(1.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)
        self.increment = tf.function(lambda: self.counts[1].assign_add(1))
        return dense(UnitKernel())

    def per_example_loss(self, batch, outputs):
        tf.cond(self.global_step < 2, lambda: self.counts[0].assign_add(1), lambda: tf.constant(0))
        self.increment()
        self.mean.assign(self.mean * 0.5)
        factor = tf.cast(tf.add_n(self.counts), tf.float64) + tf.cast(self.mean, tf.float64)
        return factor * super().per_example_loss(batch, outputs)


def test_micro_batches_assign_once(caplog):
    split = Split(2, batch=8, micro_batches=3)
    reference = running.train(Conditional, split.reference)
    assert running.difference(reference, running.train(Conditional, split)) < 1e-14
    assert "does not hold" not in caplog.text


class DependsOnCondition(Case):
    def build_model(self):
        self.count = tf.Variable(0, trainable=False)
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        large = tf.reduce_max(outputs) > 0.1
        tf.cond(large, lambda: self.count.assign_add(1), lambda: tf.constant(0))
        return super().per_example_loss(batch, outputs)


@pytest.mark.parametrize("case", [state.CenterLoss, DependsOnCondition])
def test_value_of_the_rows_of_a_micro_batch_is_rejected(case):
    message = (
        r"\w+\.py:\d+ assigns \S+:0 a value that depends on the rows of the batch, but a micro-batch "
        r"is computed without the others: set optimizer.micro_batches=1\."
    )
    with pytest.raises(ctl.UsageError, match=message):
        running.build(case, Split(1, micro_batches=2)).train(tf.constant(1))


class Global(Case):
    """Assigns a variable that a plain object holds, which TensorFlow does not track."""

    def build_model(self):
        self.plain = types.SimpleNamespace(count=tf.Variable(0, trainable=False))
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        self.plain.count.assign_add(1)
        return super().per_example_loss(batch, outputs)


def test_variable_that_the_trainer_does_not_hold_is_rejected_with_micro_batches():
    with pytest.raises(ctl.UsageError, match=r"\.py:\d+ assigns .*micro-batch"):
        running.build(Global, Split(1, micro_batches=2)).train(tf.constant(1))


def test_variable_that_the_trainer_does_not_hold_is_named_once(caplog):
    trainer = running.build(Global, Split(2))
    for _ in range(2):
        trainer.train(tf.constant(1))
    (line,) = [line for line in caplog.messages if "does not hold" in line]
    assert re.match(r"\S+\.py:\d+ assigns a variable", line)


def test_metrics_and_moving_statistics_follow_every_micro_batch():
    class Measured(normalization.PlainBatchNormalization):
        def build_model(self):
            self.rows = tf_keras.metrics.Sum(dtype=tf.float64)
            return super().build_model()

        def per_example_loss(self, batch, outputs):
            self.rows.update_state(tf.ones_like(outputs[:, 0]))
            return super().per_example_loss(batch, outputs)

    trainer = running.build(Measured, Split(1, batch=8, micro_batches=2))
    trainer.train(tf.constant(1))
    assert trainer.rows.result() == 8
    moved, others = running.build(Measured, Split(1, batch=8)), trainer.model.layers
    moved.train(tf.constant(1))
    (layer,) = [layer for layer in others if hasattr(layer, "moving_mean")]
    (once,) = [layer for layer in moved.model.layers if hasattr(layer, "moving_mean")]
    # Two updates of momentum 0.99, with statistics that are not those of the complete batch.
    assert abs(layer.moving_variance - 0.99**2).numpy().min() > 1e-6
    assert abs(layer.moving_variance - once.moving_variance).numpy().max() > 1e-4


def test_assignments_are_found_in_called_functions():
    one, two = tf.Variable(0.0), tf.Variable([0.0, 0.0])

    @tf.function
    def step(x):
        one.assign_add(1.0)
        tf.cond(x > 0, lambda: two.scatter_nd_add([[0]], [x]), lambda: two.read_value())
        return tf.gather(two, 0)

    operations = step.get_concrete_function(tf.TensorSpec([])).graph.get_operations()
    found = list(find_assignments(operations))
    assert [assignment.handle is v.handle for assignment, v in zip(found, (one, two), strict=True)]
    assert [len(assignment.calls) for assignment in found] == [0, 1]
