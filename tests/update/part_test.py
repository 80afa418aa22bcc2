"""A part of the step changes the gradients of the global batch, and has its state in checkpoints.

A step that is skipped does not change the state of a part.
"""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.configs.options import Clip
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.update import part
from ctl.update.gradients import map_values
from tests.support import faulty_trainers, reference_model


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


def make(replicas, batch=7, **options):
    options = {"optimizer": lambda: tf_keras.optimizers.SGD(0.1), **options}
    return reference_model.make_trainer(testing.make_strategy(replicas), batch, **options)


@pytest.mark.slow
def test_part_changes_gradients_before_they_are_clipped_and_is_resumed(tmp_path, monkeypatch):
    bound = 1e-6  # less than every gradient, so that the factor has no effect on what is clipped
    expected = {0.0: make(1), bound: make(1, clip=Clip(value=bound))}
    for clip, by_hand in expected.items():
        for step in range(3):
            by_hand.optimizer.learning_rate = 0.1 * (1 if clip else step + 1)
            by_hand.train(tf.constant(1))
    monkeypatch.setattr(reference_model.ReferenceTrainer, "build_parts", lambda self: [Growing()])
    trainer, resumed, clipped = make(2), make(2), make(1, clip=Clip(value=bound))
    trainer.train(tf.constant(1))
    Checkpointer(tmp_path, trainer).save()
    Checkpointer(tmp_path, resumed).all_restore_latest()
    resumed.train(tf.constant(2))
    clipped.train(tf.constant(3))
    for by_hand, actual in zip(expected.values(), (resumed, clipped), strict=True):
        pairs = zip(by_hand.model.get_weights(), actual.model.get_weights(), strict=True)
        assert max(np.abs(one - other).max() for one, other in pairs) < 1e-12


def test_skipped_step_leaves_the_weights_and_every_part_as_they_were_on_every_replica():
    """The gradient of one micro-batch of one replica overflows, and its loss is finite."""
    planted = {"replica": 1, "position": 2, "at": 1}
    trainer = make(
        2, 8, cls=type("Planted", (faulty_trainers.Overflowing,), planted),
        optimizer=lambda: tf_keras.optimizers.SGD(1e-2, momentum=0.9), precision="float16",
        micro_batches=2, compression="float16", ema_decay=0.9, norms="layers",
    )  # fmt: skip
    compression, _, average = loop_of(trainer).step.parts
    assert {a.dtype for a in average.averages} == {tf.float32}
    errors = [error.local for error in compression.errors]
    variables = (*trainer.model.variables, *trainer.optimizer.variables)
    kept = [v for v in variables if "loss_scale" not in v.name and "current" not in v.name]

    def state():
        return [testing.copies(trainer.strategy, v) for v in (*errors, *average.averages, *kept)]

    applied = trainer.train(tf.constant(1))
    before, scale = state(), float(trainer.optimizer.loss_scale.numpy())
    assert any(np.any(copies) for copies in before[: len(errors)])
    skipped = trainer.train(tf.constant(1))
    faulty_trainers.same(before, state())
    assert float(trainer.optimizer.loss_scale.numpy()) == scale / 2
    assert trainer.optimizer.iterations.numpy() == 1
    assert trainer.global_step.numpy() == 2
    assert trainer.skipped_steps.numpy() == skipped["skipped_steps"].numpy() == 1
    # The loop has no step that was applied.
    names = ("loss", "accuracy", "gradient_norm", "parameter_norm", "update_norm")
    assert all(np.isfinite(applied[n]) and np.isnan(skipped[n]) for n in names)
    assert all(np.isnan(norm) for norm in skipped["layers"]["gradient_norm"].values())
    assert float(applied["gradient_non_finite_share"]) == 0
    assert 0 < float(skipped["gradient_non_finite_share"]) <= 1
    trainer.train(tf.constant(1))
    assert trainer.optimizer.iterations.numpy() == 2
    assert trainer.global_step.numpy() == 3
    after = state()
    changed = [not np.array_equal(old, new) for old, new in zip(before, after, strict=True)]
    assert any(changed[: len(errors)]) and all(changed[len(errors) :])
    assert np.isfinite(np.concatenate([np.ravel(copies) for copies in after])).all()
    for one, other in after[len(errors) :]:
        np.testing.assert_array_equal(one, other)
    trainer.global_step.assign(0)
    both = trainer.train(tf.constant(2))
    assert all(np.isfinite(both[n]) for n in names) and both["update_norm"] > 0
