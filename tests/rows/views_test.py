"""Views of the rows on axis 0 train as on one replica: normalized, drawn for, gathered and compared."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.data.source import Nest
from tests.users_code import running
from tests.users_code.examples import Case
from tests.users_code.running import Split

layers = tf_keras.layers


class Views(Case):
    """Two views in one call of a model that normalizes and draws; each entry is classified."""

    features = ("x", "view", "label")
    normalization: type = ctl.SyncBatchNormalization

    def build_model(self):
        noise = [layers.Dropout(0.5), layers.GaussianNoise(0.5)]
        return tf_keras.Sequential([layers.Dense(5), self.normalization(), *noise, layers.Dense(3)])

    def join(self, *views: Nest) -> Nest:
        return ctl.replica.views(*views)

    def forward(self, batch, training):
        z = self.model(self.join(batch["x"], batch["view"]), training=training)
        return tf.split(z + ctl.random.normal(tf.shape(z), dtype=z.dtype), 2)

    def per_example_loss(self, batch, outputs):
        return sum(super(Views, self).per_example_loss(batch, z) for z in outputs)


class MicroBatches(Views):
    normalization = layers.LayerNormalization


class Contrast(Views):
    """SimCLR's loss: each entry among all others of both views, the other view of its row is right."""

    def build_model(self):
        return tf_keras.Sequential([layers.Dense(5), self.normalization(), layers.Dense(3)])

    def join(self, *views):
        return tf.concat(views, axis=0)  # as its authors write it

    def forward(self, batch, training):
        return self.model(self.join(batch["x"], batch["view"]), training=training)

    def per_example_loss(self, batch, outputs):
        others, places = ctl.replica.all_gather(outputs), ctl.replica.positions(outputs)
        count = tf.shape(others)[0]
        logits = outputs @ tf.transpose(others) - 1e9 * tf.one_hot(places, count, dtype=tf.float64)
        pairs = (places + count // 2) % count
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(pairs, logits)
        return tf.reduce_sum(tf.reshape(losses, [2, -1]), axis=0)


@pytest.mark.parametrize(
    ("case", "split"),
    [
        *[(case, Split(n, rows)) for case in (Views, Contrast) for n, rows in ((2, 8), (2, 7), (4, 5))],
        (MicroBatches, Split(2, 8, micro_batches=2)),
        (Views, Split(2, 8, ragged=True)),
        (Contrast, Split(2, 8, ragged=True)),
    ],
)  # fmt: skip
def test_every_split_trains_as_one_replica(case, split):
    reference = running.train(case, split.reference)
    assert running.difference(reference, running.train(case, split)) <= 1e-12


def test_views_of_other_numbers_of_rows_are_rejected():
    class Wrong(Views):
        def join(self, *views):
            return ctl.replica.views(*[view[:2] for view in views])

    with pytest.raises(ctl.UsageError, match=r"views got shape \(2, 6\), but requires \[4, ...\]"):
        running.train(Wrong, Split(2, 8))
