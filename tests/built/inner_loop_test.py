"""The inner loop of a trainer: attributes of Orbit on the same object, and errors of one line."""

import gc

import numpy as np
import orbit
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.testing import tiny
from tests.support import reference_model
from tests.support.checks import one_line


def make(replicas=1, *, cls=tiny.TinyTrainer, **options):
    return reference_model.make_trainer(testing.make_strategy(replicas), 8, cls=cls, **options)


def test_attributes_of_orbit_that_a_subclass_overwrites_are_reported():
    trainer = make()
    # ctl sets these itself.
    trainer._train_iter = trainer._train_dataset = 3
    trainer.train(tf.constant(1))
    assert trainer.global_step.numpy() == 1
    for name in ("_train_options", "_train_loop_fn"):
        setattr(trainer, name, 3)
        with pytest.raises(ctl.UsageError, match=f"self.{name} belongs to orbit.StandardTrainer"):
            trainer.train(tf.constant(1))
        setattr(trainer, name, orbit.StandardTrainerOptions())


@pytest.mark.parametrize("name", ["replica_step", "train_step"])
def test_step_that_is_assigned_to_a_trainer_is_rejected(name):
    trainer = make()
    setattr(trainer, name, lambda argument: tf.constant(0.0))
    with pytest.raises(ctl.UsageError, match=f"self.{name} was assigned .* in its class"):
        trainer.train(tf.constant(1))


def test_optimizer_that_is_replaced_between_two_loops_is_used():
    trainer = make()
    for rate in (0.1, 0.0):
        with trainer.build_scope():
            trainer.optimizer = tf_keras.optimizers.SGD(rate)
        before = trainer.model.get_weights()[0]
        trainer.train(tf.constant(1))
        assert np.any(trainer.model.get_weights()[0] != before) == (rate > 0)


def test_garbage_collector_is_paused_while_the_trainer_is_built_and_its_loop_is_traced():
    enabled = []

    class Recording(tiny.TinyTrainer):
        def forward(self, batch, training):
            enabled.append(gc.isenabled())
            return super().forward(batch, training)

    trainer = make(cls=Recording)
    trainer.train(tf.constant(1))
    assert len(enabled) > 1
    assert not any(enabled)
    assert gc.isenabled()


# Errors in an inner loop.


def test_update_in_a_branch_that_depends_on_a_tensor_is_rejected_on_several_replicas():
    class Branches(tiny.TinyTrainer):
        def replica_step(self, batch):
            if self.global_step > 3:
                return super().replica_step(batch)
            return super().replica_step(batch) * 2.0

    trainer = make(2, cls=Branches)
    with one_line("branch or a loop that depends on a tensor"):
        trainer.train(tf.constant(1))


def test_end_of_the_training_data_names_the_step():
    trainer = make()
    dataset = tf.data.Dataset.from_tensor_slices(tiny.examples(16)).batch(8)
    trainer.train_dataset = trainer.strategy.experimental_distribute_dataset(dataset)
    message = "The training data ended after step 2: return"
    with one_line(message):
        trainer.train(tf.constant(3))


@pytest.mark.slow
def test_gradient_of_a_loop_without_a_bound_is_rejected_under_xla():
    class Loops(tiny.TinyTrainer):
        def per_example_loss(self, batch, outputs):
            losses = super().per_example_loss(batch, outputs)
            count = tf.cast(losses[0] > 0, tf.int32) + 2
            step = lambda i, x: (i + 1, tf.sin(x))  # noqa: E731
            return tf.while_loop(lambda i, x: i < count, step, [0, losses])[1]

    trainer = make(cls=Loops, xla="loop")
    message = r"pass maximum_iterations .* runtime\.xla=off"
    with one_line(message):
        trainer.train(tf.constant(1))
