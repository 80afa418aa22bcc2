"""What is built before the first step, and what must be true of it."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests import tiny


class Normalized(tiny.TinyTrainer):
    """A model with a plain batch normalization."""

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [layers.InputLayer([4]), layers.Dense(5), layers.BatchNormalization(), layers.Dense(3)]
        )

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)


def test_plain_batch_norm_is_warned_of_where_the_batch_is_split(strategy, caplog):
    tiny.trainer(strategy(2), 8, cls=Normalized)
    assert "ctl.SyncBatchNormalization" in caplog.text
    caplog.clear()
    tiny.trainer(strategy(1), 8, cls=Normalized)
    tiny.trainer(strategy(2), 8, cls=Normalized, model={"sync_batch_norm": True})
    assert caplog.text == ""


def test_sync_batch_norm_key_makes_the_update_that_of_one_replica(strategy):
    ends = []
    for replicas, batch in ((1, 7), (2, 7), (4, 7)):
        trainer = tiny.trainer(
            strategy(replicas),
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


def test_sync_batch_norm_with_accumulation_must_be_asked_for(strategy):
    options = {"cls": Normalized, "gradient_accumulation_steps": 2}
    with pytest.raises(ctl.UsageError, match="sync_batch_norm=per_micro_batch"):
        tiny.trainer(strategy(2), 8, model={"sync_batch_norm": True}, **options)
    tiny.trainer(strategy(2), 8, model={"sync_batch_norm": "per_micro_batch"}, **options)


def test_sync_batch_norm_without_batch_norm_or_with_another_value_is_refused(strategy):
    with pytest.raises(ctl.UsageError, match="no effect"):
        tiny.trainer(strategy(1), 8, model={"sync_batch_norm": True})
    with pytest.raises(ctl.UsageError, match="want True, False or"):
        tiny.trainer(strategy(1), 8, cls=Normalized, model={"sync_batch_norm": "yes"})
