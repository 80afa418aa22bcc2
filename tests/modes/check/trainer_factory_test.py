"""The factory makes untrained trainers and reads the experiment's training batches."""

import dataclasses

from ml_collections import config_dict
import numpy as np
import tensorflow as tf
import tf_keras

from ctl.configs import group_values
from ctl.modes.check.trainer_factory import TrainerFactory
from ctl.update.gradients import optimizers_of


def test_a_trainer_is_untrained_and_has_the_experiments_settings(correct_factory):
    trainer, other = correct_factory.make_trainer(), correct_factory.make_trainer()
    assert int(trainer.global_step.numpy()) == 0
    assert trainer.global_batch_size == correct_factory.global_batch_size == 8
    assert trainer.strategy is correct_factory.experiment.hardware.strategy
    assert trainer is not other
    assert [v.name for v in trainer.model.variables] == [v.name for v in other.model.variables]


def test_rows_optimizer_and_options_replace_those_of_the_experiment(correct_factory):
    rows = {name: values[:3] for name, values in correct_factory.read_batches(1)[0].items()}
    trainer = correct_factory.make_trainer(
        rows=rows, optimizer=lambda: tf_keras.optimizers.SGD(0.5), precision="float64"
    )
    assert trainer.global_batch_size == 3
    assert trainer.optimizer.learning_rate.numpy() == 0.5
    assert trainer.options.precision == "float64"
    assert np.isfinite(float(trainer.train(tf.constant(1))["loss"]))


def test_optimizer_that_is_given_also_replaces_those_of_groups(correct_factory):
    config = config_dict.ConfigDict(correct_factory.experiment.config.to_dict())
    groups = [{"variables": "*/bias", "optimizer": {"name": "sgd"}}]
    config.optimizer.groups = group_values.complete(groups)
    experiment = dataclasses.replace(correct_factory.experiment, config=config)
    factory = TrainerFactory(experiment, correct_factory.config_path)
    for given, count in ((None, 2), (tf_keras.optimizers.SGD, 1)):
        assert len(optimizers_of(factory.make_trainer(optimizer=given).optimizer)) == count


def test_batches_are_global_and_can_start_at_a_later_step(correct_factory):
    batches = correct_factory.read_batches(3)
    assert [batch["x"].shape for batch in batches] == [(8, 4)] * 3
    later = correct_factory.read_batches(1, start=2)[0]
    assert all(np.array_equal(later[name], batches[2][name]) for name in later)
