"""The variables that a step assigns are restored on every replica if the update is skipped."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.replica.arithmetic.snapshot import Snapshot
from tests.support import reference_model
from tests.support.faulty_trainers import BAD, Poisoned, poisoned


@pytest.mark.parametrize("applied", [True, False])
def test_values_are_restored_unless_the_update_was_applied(applied):
    where = testing.make_strategy(2)
    with where.scope():
        metric = tf_keras.metrics.Mean()
    where.run(lambda: metric.update_state(4.0))

    def replica_step():
        snapshot = Snapshot(metric.variables)
        metric.update_state(float("nan"))
        snapshot.restore_unless(tf.constant(applied))

    tf.function(lambda: where.run(replica_step))()
    for copy in testing.copies(where, metric.total):
        assert np.isnan(copy) if applied else copy == 4.0


def test_only_assigned_variables_are_restored():
    variables = [tf.Variable(1.0), tf.Variable(2.0)]

    def replica_step():
        snapshot = Snapshot(variables)
        variables[1].assign_add(1.0)
        before = len(tf.compat.v1.get_default_graph().get_operations())
        snapshot.restore()
        added = tf.compat.v1.get_default_graph().get_operations()[before:]
        assert [op.inputs[0].op.name for op in added if op.type == "AssignVariableOp"] == [
            snapshot._copies[id(variables[1].handle)].value.op.inputs[0].op.name
        ]

    tf.function(replica_step)()
    assert [v.numpy() for v in variables] == [1.0, 2.0]


def test_eager_execution_restores_everything():
    variable = tf.Variable(1.0)
    snapshot = Snapshot([variable])
    variable.assign(2.0)
    snapshot.restore()
    assert variable.numpy() == 1.0


class Moving(tf_keras.layers.Layer):
    """A running mean of the rows, and a kernel that is trained and assigned too."""

    def build(self, shape):
        self.mean = self.add_weight("mean", shape[1:], initializer="zeros", trainable=False)
        self.kernel = self.add_weight("kernel", (shape[1], 3), initializer="ones")

    def call(self, x):
        rows = ctl.replica.all_gather(x)
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(rows, axis=0))
        self.kernel.assign(self.kernel / (1 + 0.1 * tf.reduce_mean(rows)))
        return tf.matmul(x - self.mean, self.kernel)


class Assigning(Poisoned):
    """Also assigns variables of the trainer: in a list, with an aggregation, and in a branch."""

    def build_model(self):
        def variable(**arguments):
            return tf.Variable(tf.zeros([3], tf.float64), trainable=False, **arguments)

        mean = tf.VariableAggregation.MEAN
        self.centers = [variable(), variable(aggregation=mean)]
        self.steps = tf.Variable(0, trainable=False)
        x = tf_keras.Input([reference_model.FEATURES])
        token = tf_keras.Input([], dtype=tf.int64)
        return tf_keras.Model({"x": x, "token": token}, Moving()(x))

    def per_example_loss(self, batch, outputs):
        rows = tf.reduce_mean(ctl.replica.all_gather(outputs), axis=0)
        for center in self.centers:
            center.assign(0.9 * center + 0.1 * rows)
        tf.cond(self.global_step >= 0, lambda: self.steps.assign_add(1), lambda: tf.constant(0))
        distance = tf.reduce_sum((outputs - self.centers[0]) ** 2, axis=1)
        return super().per_example_loss(batch, outputs) + distance


def values(trainer):
    variables = [*trainer.model.variables, *trainer.centers, trainer.steps]
    return [testing.copies(trainer.strategy, variable) for variable in variables]


def assert_same(one, other, tolerance=0.0):
    for copies, expected in zip(one, other, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, expected[0], rtol=0, atol=tolerance)


@functools.cache
def values_without_the_bad_step():
    trainer = poisoned(1, -1, cls=Assigning)
    trainer.train(tf.constant(BAD))
    trainer.global_step.assign(BAD + 1)
    trainer.train(tf.constant(2))
    return values(trainer)


@pytest.mark.parametrize(
    "replicas, options", [(2, {}), pytest.param(1, {"xla": "loop"}, marks=pytest.mark.slow)]
)
def test_variables_of_a_skipped_step_are_restored_on_every_replica(replicas, options):
    trainer = poisoned(replicas, 5, cls=Assigning, on_non_finite="skip", **options)
    trainer.train(tf.constant(BAD))
    before = values(trainer)
    trainer.train(tf.constant(1))
    assert_same(values(trainer), before)
    trainer.train(tf.constant(2))
    assert_same(values(trainer), values_without_the_bad_step(), 1e-12)
    assert trainer.steps.numpy() == BAD + 2
