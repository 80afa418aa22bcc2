"""A run that is resumed on other replicas trains on the same global batches."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.loop.checkpoints.checkpointer import Checkpointer
from tests.support import reference_model

STEPS = 10  # between two checkpoints


class Dropping(reference_model.ReferenceTrainer):
    dropout = 0.3


def make_trainer(replicas, batch, **options):
    options = {"optimizer": lambda: tf_keras.optimizers.Adam(1e-2), **options}
    strategy = testing.make_strategy(replicas)
    return reference_model.make_trainer(strategy, batch, cls=Dropping, **options)


def read_variables(trainer):
    """All variables, which must be the same on every replica."""
    for variable in trainer.model.variables:
        first, *rest = testing.copies(trainer.strategy, variable)
        assert all(np.array_equal(copy, first) for copy in rest)
    return [v.numpy() for v in (*trainer.model.variables, *trainer.optimizer.variables)]


def resume(folder, batch, splits, **options):
    """Returns the variables after training on several splits, and those of only the first one.

    The first part of the uninterrupted run is that of the resumed one, too.
    """
    uninterrupted = make_trainer(batch=batch, **splits[0], **options)
    uninterrupted.train(tf.constant(STEPS))
    Checkpointer(folder, uninterrupted).save()
    for count, split in enumerate(splits[1:], 1):
        trainer = make_trainer(batch=batch, **split, **options)
        checkpoints = Checkpointer(folder, trainer)
        assert checkpoints.all_restore_latest()
        assert trainer.global_step.numpy() == count * STEPS
        trainer.train(tf.constant(STEPS))
        checkpoints.save()
    uninterrupted.train(tf.constant((len(splits) - 1) * STEPS))
    return zip(read_variables(trainer), read_variables(uninterrupted), strict=True)


@pytest.mark.slow
def test_run_resumed_on_other_replicas_and_micro_batches_ends_like_an_uninterrupted_one(tmp_path):
    # On 4 replicas one has no row of 5, and on 2 they have 3 and 2, in micro-batches of 2 + 1 and 1 + 1.
    splits = [{"replicas": 1}, {"replicas": 4}, {"replicas": 2, "micro_batches": 2}]
    for actual, value in resume(tmp_path, 5, splits):
        np.testing.assert_allclose(actual, value, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [4, 0])
def test_with_logical_shards_and_only_with_them_it_ends_with_the_same_bits(tmp_path, shards):
    options = {"precision": "float32", "logical_shards": shards, "xla": "off"}
    pairs = resume(tmp_path, 16, [{"replicas": 1}, {"replicas": 2}], **options)
    assert all(a.tobytes() == b.tobytes() for a, b in pairs) == bool(shards)
