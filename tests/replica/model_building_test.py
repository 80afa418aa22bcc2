"""What is built before the first step, and what must be true of it."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
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


def test_plain_batch_norm_is_warned_of_where_the_batch_is_split(caplog):
    reference_model.make_trainer(testing.make_strategy(2), 8, cls=Normalized)
    assert "ctl.SyncBatchNormalization" in caplog.text
    caplog.clear()
    reference_model.make_trainer(testing.make_strategy(1), 8, cls=Normalized)
    reference_model.make_trainer(
        testing.make_strategy(2), 8, cls=Normalized, model={"sync_batch_norm": True}
    )
    assert caplog.text == ""


def test_sync_batch_norm_key_makes_the_update_that_of_one_replica():
    ends = []
    for replicas, batch in ((1, 7), (2, 7), (4, 7)):
        trainer = reference_model.make_trainer(
            testing.make_strategy(replicas),
            batch,
            cls=Normalized,
            model={"sync_batch_norm": True},
            optimizer=lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
        )
        trainer.train(tf.constant(20))
        ends.append(trainer.model.get_weights())
    for end in ends[1:]:
        for one, other in zip(ends[0], end, strict=True):
            assert abs(one - other).max() < 1e-10


def test_sync_batch_norm_with_accumulation_must_be_asked_for():
    options = {"cls": Normalized, "gradient_accumulation_steps": 2}
    with pytest.raises(ctl.UsageError, match="sync_batch_norm=per_micro_batch"):
        reference_model.make_trainer(
            testing.make_strategy(2), 8, model={"sync_batch_norm": True}, **options
        )
    reference_model.make_trainer(
        testing.make_strategy(2), 8, model={"sync_batch_norm": "per_micro_batch"}, **options
    )


def test_sync_batch_norm_without_batch_norm_or_with_another_value_is_refused():
    with pytest.raises(ctl.UsageError, match="no effect"):
        reference_model.make_trainer(testing.make_strategy(1), 8, model={"sync_batch_norm": True})
    with pytest.raises(ctl.UsageError, match="must be True, False or"):
        reference_model.make_trainer(
            testing.make_strategy(1), 8, cls=Normalized, model={"sync_batch_norm": "yes"}
        )
