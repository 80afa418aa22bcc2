"""What the constructor of a trainer builds from its options: model, optimizer and variables."""

import random
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built import build
from tests.support import reference_model


def test_random_states_and_precision_are_restored_also_after_an_error():
    def state():
        return random.getstate(), np.random.get_state()[1].tolist(), tf_keras.backend.floatx()

    before = state()
    with (
        pytest.raises(ZeroDivisionError),
        build.seed_and_precision(ctl.TrainerOptions(precision="float64")),
    ):
        assert state() != before
        raise ZeroDivisionError
    assert state() == before


def test_rate_of_a_schedule_can_be_assigned_by_every_replica():
    schedule = tf_keras.optimizers.schedules.CosineDecay(0.1, 10)
    with testing.make_strategy(2).scope():
        optimizer = build.make_optimizer(
            lambda: tf_keras.optimizers.SGD(schedule), ctl.TrainerOptions()
        )
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    assert optimizer._current_learning_rate.aggregation == first


def test_variables_are_created_without_running_the_forward_pass():
    model = tf_keras.Sequential([tf_keras.layers.Dense(3)])

    def forward(batch):
        with tf.control_dependencies([tf.debugging.assert_positive(batch["x"])]):
            return model(batch["x"])

    build.create_variables(forward, {"x": tf.TensorSpec([None, 2])})
    assert [v.shape.as_list() for v in model.variables] == [[2, 3], [3]]


SCALED, LEGACY = tf_keras.mixed_precision.LossScaleOptimizer, tf_keras.optimizers.legacy


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adam", "is 'adam', but must be an optimizer of tf_keras, or a function that"),
        (lambda: None, "is None, but must be an optimizer of tf_keras"),
        (lambda: SCALED(LEGACY.SGD()), "is a SGD, a tf_keras.optimizers.legacy.Optimizer: use tf_"),
        (
            lambda: type("AdamWeightDecay", (LEGACY.Adam,), {})(),
            "is an AdamWeightDecay, a tf_keras.optimizers.legacy.Optimizer: use optimi",
        ),
    ],
)  # fmt: skip
def test_optimizer_that_cannot_compute_the_update_is_rejected(optimizer, message):
    with pytest.raises(ctl.UsageError, match=f"^The optimizer {re.escape(message)}"):
        reference_model.make_trainer(testing.make_strategy(2), 8, optimizer=optimizer)


def test_nadam_counts_its_updates_unless_a_subclass_has_another_update():
    class Own(tf_keras.optimizers.Nadam):
        def update_step(self, gradient, variable):
            variable.assign_sub(gradient)

    assert isinstance(build.check_optimizer(Own()), Own)
    with pytest.raises(ctl.UsageError, match=r"Nadam counts"):
        build.check_optimizer(SCALED(tf_keras.optimizers.Nadam()))


def test_model_that_is_not_of_tf_keras_is_rejected():
    message = "^build_model returned a Module, but must return a tf_keras.Model, or a model of"
    with pytest.raises(ctl.UsageError, match=message):
        build.check_model(tf.Module())


@pytest.mark.parametrize("replicas", [0, 2])
def test_layer_that_carries_its_state_to_the_next_batch_is_rejected(replicas):
    class Stateful(reference_model.ReferenceTrainer):
        def build_model(self):
            return tf_keras.Sequential([tf_keras.layers.GRU(2, stateful=True, name="memory")])

    strategy = testing.make_strategy(replicas) if replicas else tf.distribute.get_strategy()
    # tf_keras itself rejects it under a strategy.
    place = r"build_test.py:\d+ makes a layer with" if replicas else "Layer memory has"
    with pytest.raises(ctl.UsageError, match=f"{place} stateful=True: .* pass it as initial_state"):
        reference_model.make_trainer(strategy, 4, cls=Stateful)


class CountsRowsInOneOfTwoLosses(reference_model.ReferenceTrainer):
    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return {"one": losses, "other": losses / len(losses)}


class NeedsStaticRows(reference_model.ReferenceTrainer):
    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return tf.reshape(losses, [losses.shape[0]])


def test_loss_that_is_divided_by_the_rows_of_the_replica_is_rejected():
    """The pipeline gives every replica the same static number of rows."""
    message = r"^per_example_loss \(.*build_test.py:\d+\) returns losses that depend on the number"
    options = {"cls": CountsRowsInOneOfTwoLosses, "loss_weights": {"one": 1.0, "other": 0.5}}
    with pytest.raises(ctl.UsageError, match=message):
        reference_model.make_trainer(testing.make_strategy(2), 8, **options)


def test_loss_that_only_requires_a_static_number_of_rows_is_accepted():
    reference_model.make_trainer(testing.make_strategy(2), 8, cls=NeedsStaticRows)
