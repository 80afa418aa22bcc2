"""A part of the step changes the gradients of the global batch, and has its state in checkpoints."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.configs.options import Clip
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.replica.arithmetic.gradients import map_values
from ctl.replica.parts import part
from ctl.replica.step import build
from tests.support import reference_model


class Growing(part.Part):
    """Multiplies the gradients by the number of the update."""

    def create(self, plan, model):
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.count = tf.Variable(1.0, dtype=plan.dtype, aggregation=first, trainable=False)

    def before(self, update):
        count = self.count.read_value()
        update.gradients = [map_values(g, lambda x: x * count) for g in update.gradients]
        return count

    def after(self, update, before, applied):
        self.count.assign(before + tf.cast(applied, before.dtype))

    def state(self):
        return {"growing": self.count}


def make(replicas, **options):
    return reference_model.make_trainer(
        testing.make_strategy(replicas),
        7,
        optimizer=lambda: tf_keras.optimizers.SGD(0.1),
        **options,
    )


@pytest.mark.slow
def test_part_changes_gradients_before_they_are_clipped_and_is_resumed(tmp_path, monkeypatch):
    bound = 1e-6  # less than every gradient, so that the factor has no effect on what is clipped
    expected = {0.0: make(1), bound: make(1, clip=Clip(value=bound))}
    for clip, by_hand in expected.items():
        for step in range(3):
            by_hand.optimizer.learning_rate = 0.1 * (1 if clip else step + 1)
            by_hand.train(tf.constant(1))
    monkeypatch.setattr(build, "open_parts", lambda options: [Growing(options)])
    trainer, resumed, clipped = make(2), make(2), make(1, clip=Clip(value=bound))
    trainer.train(tf.constant(1))
    Checkpointer(tmp_path, trainer).save()
    Checkpointer(tmp_path, resumed).all_restore_latest()
    resumed.train(tf.constant(2))
    clipped.train(tf.constant(3))
    for by_hand, actual in zip(expected.values(), (resumed, clipped), strict=True):
        pairs = zip(by_hand.model.get_weights(), actual.model.get_weights(), strict=True)
        assert max(np.abs(one - other).max() for one, other in pairs) < 1e-12
