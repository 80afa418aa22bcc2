"""What the constructor of a trainer builds from its options."""

import tensorflow as tf
import tf_keras

from ctl import testing
from tests import reference_model


class Normalized(reference_model.ReferenceTrainer):
    """A model with a plain batch normalization."""

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [layers.InputLayer([4]), layers.Dense(5), layers.BatchNormalization(), layers.Dense(3)]
        )

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)


def test_sync_batch_norm_key_gives_the_update_of_one_replica():
    ends = []
    for replicas in (1, 2):
        trainer = reference_model.make_trainer(
            testing.make_strategy(replicas),
            7,
            cls=Normalized,
            model={"sync_batch_norm": True},
            optimizer=lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
        )
        trainer.train(tf.constant(20))
        ends.append(trainer.model.get_weights())
    for one, other in zip(*ends, strict=True):
        assert abs(one - other).max() < 1e-10


def test_sync_batch_norm_key_converts_the_layers():
    trainer = reference_model.make_trainer(
        testing.make_strategy(1), 8, cls=Normalized, model={"sync_batch_norm": True}
    )
    assert [layer.synchronized for layer in trainer.model.layers if hasattr(layer, "momentum")] == [
        True
    ]


def test_variables_slots_and_counters_exist_before_the_first_step():
    trainer = reference_model.make_trainer(
        testing.make_strategy(2), 8, optimizer=lambda: tf_keras.optimizers.Adam(1e-3)
    )
    assert len(trainer.model.trainable_variables) == 5
    slots = [v.name for v in trainer.optimizer.variables if "iteration" not in v.name]
    assert len(slots) >= 2 * 5
    assert {*trainer.metrics} == {"accuracy"}
    assert trainer.global_step.numpy() == trainer.skipped_steps.numpy() == 0


def test_initial_weights_depend_on_the_seed_alone():
    first, second, other = (
        reference_model.make_trainer(testing.make_strategy(n), 8, seed=seed).model.get_weights()
        for n, seed in ((1, 0), (4, 0), (1, 1))
    )
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert not (first[0] == other[0]).all()
