"""A run that is resumed on other replicas trains on the same global batches."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.loop.checkpoints.checkpointer import Checkpointer
from tests import reference_model

STEPS = 10  # between two checkpoints


class Dropping(reference_model.ReferenceTrainer):
    dropout = 0.3


def make_trainer(replicas, batch, **options):
    return reference_model.make_trainer(
        testing.make_strategy(replicas),
        batch,
        cls=Dropping,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-2),
        **options,
    )


def read_variables(trainer):
    """All variables, which must be the same on every replica."""
    for variable in trainer.model.variables:
        first, *rest = testing.copies(trainer.strategy, variable)
        assert all(np.array_equal(copy, first) for copy in rest)
    return [v.numpy() for v in (*trainer.model.variables, *trainer.optimizer.variables)]


def train_uninterrupted(batch, **options):
    trainer = make_trainer(1, batch, **options)
    trainer.train(tf.constant(3 * STEPS))
    return read_variables(trainer)


def train_resumed(folder, batch, **options):
    """Trains on 1, then 4, then 2 replicas, each from the checkpoint of the one before."""
    for count, replicas in enumerate((1, 4, 2)):
        trainer = make_trainer(replicas, batch, **options)
        checkpoints = Checkpointer(folder, trainer)
        assert bool(checkpoints.all_restore_latest()) == (count > 0)
        assert trainer.global_step.numpy() == count * STEPS
        trainer.train(tf.constant(STEPS))
        checkpoints.save()
    return read_variables(trainer)


@pytest.mark.parametrize("batch", [8, 7, 5])  # even, uneven, and with an empty per-replica batch
def test_run_resumed_on_other_replicas_ends_like_an_uninterrupted_one(tmp_path, batch):
    expected = train_uninterrupted(batch)
    for actual, value in zip(train_resumed(tmp_path, batch), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shards", [4, 0])
def test_with_logical_shards_and_only_with_them_it_ends_with_the_same_bits(tmp_path, shards):
    options = {"precision": "float32", "logical_shards": shards, "xla": "off"}
    expected = train_uninterrupted(16, **options)
    actual = train_resumed(tmp_path, 16, **options)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(actual, expected, strict=True))
    assert same == bool(shards)
