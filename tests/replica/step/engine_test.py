"""The engine of a trainer, with the attributes that Orbit keeps on the same object."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from tests import reference_model
from tests.faulty_trainers import BAD, Poisoned, poisoned


def test_statistics_of_a_second_model_are_restored_if_the_step_is_skipped():
    class TwoModels(Poisoned):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            with self.build_scope():
                self.second = tf_keras.Sequential([tf_keras.layers.BatchNormalization()])
                self.second.build([None, 3])

        def replica_step(self, batch):
            self.second(self.forward(batch, training=True), training=True)
            return super().replica_step(batch)

    trainer = poisoned(2, 1, cls=TwoModels, on_non_finite="skip")
    trainer.train(tf.constant(BAD))
    variables = trainer.second.non_trainable_variables
    before = [testing.copies(trainer.strategy, variable) for variable in variables]
    trainer.train(tf.constant(1))
    after = [testing.copies(trainer.strategy, variable) for variable in variables]
    np.testing.assert_array_equal(np.stack(after), np.stack(before))
    trainer.train(tf.constant(1))
    moved = [testing.copies(trainer.strategy, variable) for variable in variables]
    assert not np.array_equal(np.stack(moved), np.stack(before))


@pytest.mark.parametrize("name", ["_train_options", "_train_loop_fn"])
def test_attributes_of_orbit_that_a_subclass_overwrites_are_reported(name):
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8)
    setattr(trainer, name, 3)
    with pytest.raises(ctl.UsageError, match=f"self.{name} belongs to orbit.StandardTrainer"):
        trainer.train(tf.constant(1))


def test_attributes_of_orbit_that_ctl_sets_itself_may_be_overwritten():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8)
    trainer._train_iter = trainer._train_dataset = 3
    trainer.train(tf.constant(1))
    assert trainer.global_step.numpy() == 1
