"""Compressed gradients together with every other option that changes what a step keeps.

A run that is stopped or rolled back continues from the errors of the checkpoint, bit for bit. The file
is named after what it tests, not after a module.
"""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.configs.options import Clip
from ctl.loop.checkpoints import matching
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.controller import Controller
from ctl.update import non_finite
from tests.support import reference_model

BATCH, STEPS = 7, 8  # 4 + 3 rows on 2 replicas, 2 + 2 + 2 + 1 on 4
SAVED, BAD = 3, 5  # the step of a checkpoint, and a later one that is skipped


class Faulty(reference_model.ReferenceTrainer):
    """One row has an infinite loss, or one that is 1,000 times as large, in step BAD."""

    weighted = False
    row, factor = 5, np.inf

    def per_example_loss(self, batch, outputs):
        return self.plant(super().per_example_loss(batch, outputs), BAD)

    def plant(self, losses, step):
        rows = ctl.replica.current()
        if rows is None:
            return losses
        indexes = tf.range(tf.shape(losses, tf.int64)[0]) + tf.cast(rows.first_row, tf.int64)
        is_bad = (indexes == self.row) & (rows.step == step)
        return losses * tf.where(is_bad, tf.constant(self.factor, losses.dtype), 1)


class Spiking(Faulty):
    factor = 1000.0


class Adversarial(Faulty):
    """A second model with its own optimizer, whose update is skipped in another step."""

    second_bad = BAD - 3

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            layers = [tf_keras.layers.Dense(6, "tanh", input_shape=[reference_model.CLASSES])]
            self.discriminator = tf_keras.Sequential([*layers, tf_keras.layers.Dense(1)])
            self.second = tf_keras.optimizers.Adam(1e-2)
            self.second.build(self.discriminator.trainable_variables)

    def judge(self, values):
        return self.discriminator(values)[:, 0]

    def discriminator_losses(self, batch):
        label = tf.one_hot(batch["label"], reference_model.CLASSES, dtype=self.compute_dtype)
        generated = tf.stop_gradient(self.forward(batch, training=True))
        losses = tf.nn.softplus(-self.judge(label)) + tf.nn.softplus(self.judge(generated))
        return self.plant(losses, self.second_bad)

    def generator_losses(self, batch):
        losses = tf.nn.softplus(-self.judge(self.forward(batch, training=True)))
        return self.plant(losses, BAD)

    def replica_step(self, batch):
        variables = self.discriminator.trainable_variables
        self.minimize(batch, self.discriminator_losses, variables=variables, optimizer=self.second)
        return self.minimize(batch, self.generator_losses)


def scaled():
    optimizer = tf_keras.optimizers.SGD(0.1, momentum=0.9)
    return tf_keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=8.0)


GROUPS = [
    {"variables": "embedding/*", "frozen": True},
    {"variables": "dense/*", "frozen_until": 4, "learning_rate_scale": 0.5},
]
COMMON = {
    "on_non_finite": "skip", "ema_decay": 0.9, "micro_batches": 2,
    "clip": Clip(global_norm=0.3), "optimizer_groups": GROUPS,
}  # fmt: skip
CASES = {
    "xla": {"xla": "gradients"},
    "shard_state": {"shard_state": True},
    "together": {"cls": Spiking, **COMMON, "loss_spike": 3.0, "optimizer": scaled},
    "two models together": {"cls": Adversarial, **COMMON, "micro_batches": 1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    """A window of 3 losses instead of 101, so that it is full before step BAD."""
    monkeypatch.setattr(non_finite, "WINDOW", 3)


def make(replicas, *, cls=reference_model.ReferenceTrainer, **options):
    tf_keras.backend.reset_uids()  # a checkpoint has the names of the variables
    optimizer = options.pop("optimizer", lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9))
    options = {"compression": "float16", "precision": "float32", **options}
    return reference_model.make_trainer(
        testing.make_strategy(replicas), BATCH, cls=cls, optimizer=optimizer, **options
    )


def state(trainer):
    """The value of every variable that a checkpoint has: [replicas, ...] for errors."""
    root = tf.train.Checkpoint(**trainer.checkpoint_items())
    variables = matching.list_variables(root)
    assert any(v.name.startswith("error/") for v in variables)
    return [(v.name, np.asarray(v.source.numpy())) for v in variables]


def model_state(trainer):
    """The weights of `trainer.model`, with their errors."""
    names = {v.name.partition(":")[0] for v in trainer.model.variables}
    return [(name, x) for name, x in state(trainer) if name.removeprefix("error/") in names]


def same_bits(one, other):
    return all(a == b and np.array_equal(x, y) for (a, x), (b, y) in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_same_after_a_rollback_and_in_a_new_process(tmp_path, case):
    trainer = make(2, **CASES[case])
    trainer.train(tf.constant(SAVED))
    checkpoints = Checkpointer(tmp_path, trainer)
    checkpoints.save()
    saved = state(trainer)
    trainer.train(tf.constant(BAD - SAVED))
    before = model_state(trainer)
    trainer.train(tf.constant(1))
    assert same_bits(model_state(trainer), before) is ("cls" in CASES[case])
    trainer.train(tf.constant(STEPS - BAD - 1))
    end = state(trainer)
    # As a rollback does: into the trainer that has trained on.
    checkpoints.all_restore_latest()
    assert same_bits(state(trainer), saved)
    trainer.train(tf.constant(STEPS - SAVED))
    assert same_bits(state(trainer), end)
    # As a new process does.
    resumed = make(2, **CASES[case])
    Checkpointer(tmp_path, resumed).all_restore_latest()
    assert same_bits(state(resumed), saved)
    skipped = 2 if case == "two models together" else "cls" in CASES[case]
    assert trainer.skipped_steps.numpy() == skipped


@pytest.mark.slow
def test_rollback_restores_the_errors_of_the_checkpoint(tmp_path):
    options = {"cls": Faulty, "ema_decay": 0.9}
    trainer, skipping = make(1, on_non_finite="rollback", **options), make(1, **options)
    checkpoints = Checkpointer(tmp_path, trainer)
    options = {"steps_per_loop": 3, "checkpoint_interval": SAVED}
    Controller(trainer=trainer, checkpoints=checkpoints, **options).train(STEPS)
    skipping.train(tf.constant(BAD))
    skipping.global_step.assign_add(1)
    skipping.train(tf.constant(STEPS - BAD - 1))
    assert trainer.global_step.numpy() == STEPS
    assert same_bits(state(trainer), state(skipping))


def test_weights_that_are_restored_without_errors_start_without_errors(tmp_path):
    plain = make(1, compression="")
    plain.train(tf.constant(1))
    Checkpointer(tmp_path, plain).save()
    trainer = make(1)
    checkpoints = Checkpointer(tmp_path, trainer, partial=True)
    checkpoints.all_restore_latest()
    first = state(trainer)
    trainer.train(tf.constant(2))
    checkpoints.all_restore_latest()  # as a rollback before the first checkpoint with errors
    assert same_bits(state(trainer), first)
