"""Tiny trainers in which one step fails: a NaN in one row, a spike of the loss, an overflow.

The row decides which replica and which micro-batch hold the bad value.
"""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.data import sampler
from tests.support import reference_model

BATCH, BAD = 8, 2  # the global batch, and the step that fails


def batch_of(step, batch=BATCH):
    """The indexes of the examples in the global batch of a step."""
    positions = tf.range(step * batch, (step + 1) * batch, dtype=tf.int64)
    count = reference_model.EXAMPLES
    return sampler.example_indexes(positions, count=count, seed=0, span=batch).numpy().tolist()


class Poisoned(reference_model.ReferenceTrainer):
    """The inputs of one row are NaN in step BAD."""

    row = 0
    weighted = False

    def preprocess(self, batch):
        batch = super().preprocess(batch)
        rows = ctl.replica.current()
        if rows is None:  # while the model is built
            return batch
        count = tf.shape(batch["x"], tf.int64)[0]
        indexes = tf.range(count) + tf.cast(rows.first_row, tf.int64)
        is_bad = tf.logical_and(tf.equal(indexes, self.row), tf.equal(rows.step, BAD))
        nan = tf.constant(np.nan, batch["x"].dtype)
        return {**batch, "x": tf.where(is_bad[:, tf.newaxis], nan, batch["x"])}


def poisoned(replicas, row, *, cls=Poisoned, **options):
    """A Poisoned trainer; no row is NaN if `row` is negative."""
    return reference_model.make_trainer(
        testing.make_strategy(replicas), BATCH, cls=type("Planted", (cls,), {"row": row}),
        optimizer=lambda: tf_keras.optimizers.Adam(1e-2), **options,
    )  # fmt: skip


class Jumping(reference_model.ReferenceTrainer):
    """The loss of one step is 100 times as large."""

    jumps_at = -1
    weighted = False

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        rows = ctl.replica.current()
        if rows is None:
            return losses
        factor = tf.where(tf.equal(rows.step, self.jumps_at), 100.0, 1.0)
        return losses * tf.cast(factor, losses.dtype)


def jumping(replicas, at, **options):
    """A Jumping trainer whose loss jumps in step `at`."""
    cls = type("Planted", (Jumping,), {"jumps_at": at})
    return reference_model.make_trainer(testing.make_strategy(replicas), BATCH, cls=cls, **options)


class Overflowing(reference_model.ReferenceTrainer):
    """Example 0 of one replica's micro-batch has an infinite gradient or loss at one step.

    Attributes:
        replica: the replica.
        position: the first row of the micro-batch within the replica's rows.
        at: the step.
        what: "gradient" or "loss".
    """

    replica, position, at, what = 0, 0, 1, "gradient"

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        rows = ctl.replica.current()
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        first = replica * loop_of(self).plan.layout.rows_per_replica
        position = rows.first_row - tf.cast(first, tf.int64)
        is_here = tf.logical_and(tf.equal(replica, self.replica), tf.equal(position, self.position))
        is_bad = tf.logical_and(tf.equal(rows.step, self.at), is_here)
        bad = tf.cast(tf.where(is_bad, np.inf, 0.0), losses.dtype)
        if self.what == "loss":
            return losses + tf.stop_gradient(bad)
        # The loss stays finite: infinity times a function that is 0 forward and has gradient 1.
        return losses + _zero_with_gradient(outputs[:, 0], bad)


@tf.custom_gradient
def _zero_with_gradient(x, factor):
    return tf.zeros_like(x), lambda upstream: (upstream * factor, None)


def state(trainer):
    """The values of all variables of the model and the optimizer."""
    return [v.numpy() for v in (*trainer.model.variables, *trainer.optimizer.variables)]


def same(one, other, tolerance=0.0):
    """Asserts that two states are equal within an absolute tolerance."""
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
