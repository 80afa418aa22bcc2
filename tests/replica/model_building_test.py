"""The scope in which models and optimizers are built, and the creation of variables."""

import random

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.replica import model_building
from tests import reference_model


def test_building_restores_the_random_state_and_the_precision():
    np.random.seed(3)
    expected = np.random.RandomState(3).rand()
    reference_model.make_trainer(testing.make_strategy(1), 8)
    assert np.random.rand() == expected
    assert tf_keras.backend.floatx() == "float32"
    assert tf_keras.mixed_precision.global_policy().name == "float32"


def test_weights_and_random_numbers_depend_on_the_seed():
    def build(seed):
        with model_building.seed_and_precision(ctl.TrainerOptions(seed=seed)):
            dense = tf_keras.layers.Dense(3)
            dense.build([None, 2])
            return [dense.kernel.numpy().tolist(), random.random(), np.random.rand()]

    assert build(1) == build(1) != build(2)


def test_scope_is_left_with_an_error():
    state = random.getstate()
    with (
        pytest.raises(ZeroDivisionError),
        model_building.seed_and_precision(ctl.TrainerOptions(precision="float64")),
    ):
        random.random()
        raise ZeroDivisionError
    assert random.getstate() == state and tf_keras.backend.floatx() == "float32"


def test_rate_of_a_schedule_can_be_assigned_by_every_replica():
    schedule = tf_keras.optimizers.schedules.CosineDecay(0.1, 10)
    with testing.make_strategy(2).scope():
        optimizer = model_building.make_optimizer(lambda: tf_keras.optimizers.SGD(schedule))
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    assert optimizer._current_learning_rate.aggregation == first


def test_variables_are_created_without_running_the_forward_pass():
    model = tf_keras.Sequential([tf_keras.layers.Dense(3)])

    def forward(batch):
        with tf.control_dependencies([tf.debugging.assert_positive(batch["x"])]):
            return model(batch["x"])

    model_building.create_variables(forward, {"x": tf.TensorSpec([None, 2])})
    assert [v.shape.as_list() for v in model.variables] == [[2, 3], [3]]


def test_sync_batch_norm_is_recognized_in_nested_models():
    layers = tf_keras.layers
    plain = tf_keras.Sequential([tf_keras.Sequential([layers.BatchNormalization()])])
    sync = tf_keras.Sequential([tf_keras.Sequential([ctl.SyncBatchNormalization()])])
    assert not model_building.has_sync_batch_norm(plain)
    assert model_building.has_sync_batch_norm(sync)
