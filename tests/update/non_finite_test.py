"""A step whose loss or gradients are not finite is reported and, under `skip`, not applied."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.errors import NonFiniteStep
from ctl.graphs.assignments import OPTIMIZER_UPDATE
from tests.support import reference_model
from tests.support.faulty_trainers import BAD, BATCH, Poisoned, batch_of, poisoned, same, state
from tests.support.optimized_graph import ancestors, optimized_nodes


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
        self.own = [variable(), variable(aggregation=mean), tf.Variable(0, trainable=False)]
        x = tf_keras.Input([reference_model.FEATURES])
        token = tf_keras.Input([], dtype=tf.int64)
        return tf_keras.Model({"x": x, "token": token}, Moving()(x))

    def per_example_loss(self, batch, outputs):
        rows = tf.reduce_mean(ctl.replica.all_gather(outputs), axis=0)
        *centers, count = self.own
        for center in centers:
            center.assign(0.9 * center + 0.1 * rows)
        tf.cond(self.global_step >= 0, lambda: count.assign_add(1), lambda: tf.constant(0))
        distance = tf.reduce_sum((outputs - centers[0]) ** 2, axis=1)
        return super().per_example_loss(batch, outputs) + distance


def values(trainer):
    """The copies of all variables that a step assigns."""
    own = getattr(trainer, "own", [])
    variables = [*trainer.model.variables, *trainer.optimizer.variables, *own]
    return [testing.copies(trainer.strategy, variable) for variable in variables]


def assert_same(actual, expected, tolerance=0.0):
    """Asserts that every copy is the first copy that is expected."""
    for copies, (value, *_) in zip(actual, expected, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=tolerance)


@functools.cache
def values_without_the_bad_step(cls):
    """The end of a run that never computes the step BAD."""
    trainer = poisoned(1, -1, cls=cls)
    trainer.train(tf.constant(BAD))
    trainer.global_step.assign(BAD + 1)
    trainer.train(tf.constant(2))
    return values(trainer)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("cls", "replicas", "row", "options"),
    [
        (Assigning, 2, 5, {}),
        pytest.param(Assigning, 1, 7, {"xla": "loop"}, marks=SLOW),
        pytest.param(Poisoned, 2, 6, {"xla": "gradients", "micro_batches": 2}, marks=SLOW),
        pytest.param(Poisoned, 2, 5, {"logical_shards": 4}, marks=SLOW),
    ],
)
def test_skip_applies_the_step_on_no_replica(cls, replicas, row, options):
    trainer = poisoned(replicas, row, cls=cls, on_non_finite="skip", **options)
    trainer.train(tf.constant(BAD))
    before = values(trainer)
    trainer.train(tf.constant(1))
    assert_same(values(trainer), before)
    report = trainer.non_finite_report
    assert (report.step, report.tensor, report.count) == (BAD, "the loss", 1)
    assert trainer.global_step.numpy() == BAD + 1 and trainer.optimizer.iterations.numpy() == BAD
    outputs = trainer.train(tf.constant(2))
    assert trainer.non_finite_report is None and np.isfinite(outputs["loss"])
    assert outputs["skipped_steps"] == 1
    end = values(trainer)
    assert_same(end, end)
    assert_same(end, values_without_the_bad_step(cls), 1e-12)


@SLOW
def test_recorded_step_is_read_before_it_is_incremented():
    trainer = poisoned(2, 5, on_non_finite="skip")
    nodes = optimized_nodes(lambda: trainer.train(tf.constant(1)))
    writes = {name for name in nodes if name.endswith("body/_1/update_0/AssignAddVariableOp")}
    variable = root(nodes, next(iter(writes)))
    reads = {
        name
        for name, node in nodes.items()
        if node.op == "ReadVariableOp"
        and ("/cond/" in name or f"/{OPTIMIZER_UPDATE}/" in name)
        and root(nodes, name) == variable
    }
    assert len(writes) == len(reads) == 1
    assert reads <= ancestors(nodes, *writes)


def root(nodes, name):
    """Returns the argument of the graph that is the first input of a node."""
    while nodes[name].op != "_Arg":
        name = nodes[name].input[0].lstrip("^").split(":")[0]
    return name


def test_stop_names_the_step_and_its_examples_and_ignore_applies_it():
    stopped, applied = (poisoned(1, 7, on_non_finite=policy) for policy in ("stop", "ignore"))
    for trainer in (stopped, applied):
        assert "skipped_steps" not in trainer.train(tf.constant(BAD))
    same(state(stopped), state(applied))
    with pytest.raises(NonFiniteStep) as stop:
        stopped.train(tf.constant(3))
    message = str(stop.value)
    assert message.startswith(f"Step {BAD} is not finite: the loss is first, on the examples ")
    examples = ", ".join(map(str, batch_of(BAD)))
    assert f"examples {examples}. No checkpoint was saved after it" in message
    assert stop.value.step == BAD
    outputs = applied.train(tf.constant(2))
    assert applied.non_finite_report is None and np.isnan(outputs["loss"])
    assert np.isnan(state(applied)[0]).any()


def test_stop_names_the_gradient_if_the_loss_is_finite():
    class Kinked(reference_model.ReferenceTrainer):
        """The square root has an infinite slope at zero."""

        def per_example_loss(self, batch, outputs):
            return super().per_example_loss(batch, outputs) + tf.sqrt(0.0 * outputs[:, 0])

    trainer = reference_model.make_trainer(testing.make_strategy(1), BATCH, cls=Kinked)
    with pytest.raises(
        NonFiniteStep, match=r"Step 0 is not finite: the gradient of .*/.*:0 is first"
    ):
        trainer.train(tf.constant(1))


def test_overflow_is_a_failure_only_at_the_smallest_loss_scale():
    trainer = poisoned(1, 0, precision="float16", loss_scale=0.0)
    trainer.optimizer.loss_scale  # noqa: B018 - creates the variable
    trainer.optimizer._loss_scale._current_loss_scale.assign(2.0**40)
    trainer.train(tf.constant(BAD))
    assert trainer.skipped_steps.numpy() == BAD and trainer.non_finite_report is None
    trainer.optimizer._loss_scale._current_loss_scale.assign(1.0)
    with pytest.raises(NonFiniteStep, match=f"Step {BAD} is not finite"):
        trainer.train(tf.constant(1))
