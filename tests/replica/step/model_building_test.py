"""The scope in which models and optimizers are built, and the creation of variables."""

import random

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.replica.step import model_building
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


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            "adam",
            "The optimizer is 'adam', but must be an optimizer of tf_keras, or a function that",
        ),
        (lambda: None, "The optimizer is None, but must be an optimizer of tf_keras"),
        (
            tf_keras.optimizers.legacy.Adam,
            "The optimizer is an Adam of tf_keras.optimizers.legacy: use tf_keras.optimizers.Adam.",
        ),
        (
            lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD()),
            "The optimizer is a SGD of tf_keras.optimizers.legacy: use tf_keras.optimizers.SGD.",
        ),
        (
            tf_keras.optimizers.Nadam,
            "tf_keras.optimizers.Nadam counts its updates in Python, which is wrong in a traced step",
        ),
        (
            lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Nadam()),
            "tf_keras.optimizers.Nadam counts its updates in Python",
        ),
    ],
)
def test_optimizer_that_cannot_compute_the_update_is_rejected(optimizer, message):
    with pytest.raises(ctl.UsageError) as error:
        reference_model.make_trainer(testing.make_strategy(2), 8, optimizer=optimizer)
    assert str(error.value).startswith(message)


def test_nadam_of_the_user_with_another_update_is_accepted():
    class Own(tf_keras.optimizers.Nadam):
        def update_step(self, gradient, variable):
            variable.assign_sub(gradient)

    assert isinstance(model_building.check_optimizer(Own()), Own)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "build_model returned None, but must return a tf_keras.Model."),
        (tf.Module(), "build_model returned a Module, but must return a tf_keras.Model."),
    ],
)
def test_model_that_is_not_of_tf_keras_is_rejected(model, message):
    with pytest.raises(ctl.UsageError) as error:
        model_building.check_model(model)
    assert str(error.value) == message
