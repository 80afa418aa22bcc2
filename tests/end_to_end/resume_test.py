"""A run that is resumed on other replicas goes on with the same global batches."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.loop.checkpoints.checkpointer import Checkpointer
from tests import reference_model

EACH = 17  # steps between two moves


def adam():
    return tf_keras.optimizers.Adam(1e-2)


class Dropping(reference_model.ReferenceTrainer):
    dropout = 0.3


def moved(folder, replicas, batch, **options):
    """Trains on each number of replicas in turn, a checkpoint between; returns all variables."""
    for place, count in enumerate(replicas):
        trainer = reference_model.make_trainer(
            testing.make_strategy(count), batch, cls=Dropping, optimizer=adam, **options
        )
        checkpoints = Checkpointer(folder, trainer)
        assert bool(checkpoints.all_restore_latest()) == (place > 0)
        assert trainer.global_step.numpy() == place * EACH
        trainer.train(tf.constant(EACH))
        checkpoints.save()
    for variable in trainer.model.variables:
        first, *rest = testing.copies(trainer.strategy, variable)
        assert all(np.array_equal(copy, first) for copy in rest)
    return [v.numpy() for v in (*trainer.model.variables, *trainer.optimizer.variables)]


@pytest.mark.parametrize("batch", [8, 7, 5])  # even, uneven, and with an empty share
def test_one_four_two_replicas(tmp_path, batch):
    stays = moved(tmp_path / "stays", (1, 1, 1), batch)
    moves = moved(tmp_path / "moves", (1, 4, 2), batch)
    for got, want in zip(moves, stays, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


def test_with_logical_shards_not_a_bit_differs_in_float32(tmp_path):
    options = {"precision": "float32", "logical_shards": 4, "xla": "off"}
    stays = moved(tmp_path / "stays", (1, 1, 1), 16, **options)
    moves = moved(tmp_path / "moves", (1, 4, 2), 16, **options)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(moves, stays, strict=True))
    without = {"precision": "float32", "xla": "off"}
    plain = moved(tmp_path / "plain", (1, 4, 2), 16, **without)
    alone = moved(tmp_path / "alone", (1, 1, 1), 16, **without)
    assert not all(a.tobytes() == b.tobytes() for a, b in zip(plain, alone, strict=True))
