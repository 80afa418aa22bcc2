"""A tiny trainer one of whose batches has a NaN, in a row of choice, and so on a replica of choice."""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl.data import sampler
from tests import tiny

BATCH, BAD = 8, 2


def batch_of(step):
    positions = tf.range(step * BATCH, (step + 1) * BATCH, dtype=tf.int64)
    return sampler.shuffled(positions, count=tiny.EXAMPLES, seed=0, span=BATCH).numpy().tolist()


class Poisoned(tiny.TinyTrainer):
    """One row of the batch of one step is NaN; which row decides which replica holds it."""

    row, what = 0, "x"
    weighted = False

    def preprocess(self, batch):
        batch = super().preprocess(batch)
        rows = ctl.replica.current()
        if rows is None:  # while the model is built
            return batch
        count = tf.shape(batch["x"])[0]
        mine = tf.range(tf.cast(count, tf.int64)) + tf.cast(rows.first_row, tf.int64)
        hit = tf.logical_and(tf.equal(mine, self.row), tf.equal(rows.step, BAD))
        nan = tf.constant(np.nan, batch["x"].dtype)
        return {**batch, "x": tf.where(hit[:, tf.newaxis], nan, batch["x"])}


def poisoned(strategy, replicas, row, *, cls=Poisoned, **options):
    return tiny.trainer(
        strategy(replicas), BATCH, cls=type("Planted", (cls,), {"row": row}),
        optimizer=lambda: tf_keras.optimizers.Adam(1e-2), **options,
    )  # fmt: skip


def state(trainer):
    return [v.numpy() for v in (*trainer.model.variables, *trainer.optimizer.variables)]


def same(one, other, tolerance=0.0):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


CASES = [
    (1, 0, {}), (1, 7, {"xla": "loop"}), (1, 3, {"xla": "step"}), (1, 5, {"xla": "gradients"}),
    (2, 0, {}), (2, 7, {}), (4, 5, {}), (2, 6, {"xla": "gradients"}), (2, 3, {"xla": "autocluster"}),
    (2, 5, {"gradient_accumulation_steps": 2}), (2, 5, {"logical_shards": 4}),
]  # fmt: skip
