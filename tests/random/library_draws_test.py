"""`ctl.random.keyed` makes the numbers of libraries the same on every split, or the step is rejected."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.support.checks import one_line
from tests.users_code import running
from tests.users_code.examples import CLASSES, Case
from tests.users_code.running import Split

layers = tf_keras.layers
GENERATOR = tf.random.Generator.from_seed(1)


def sample(mean, scale):
    """As the distributions of TensorFlow Probability: a seed, then a stateless draw."""
    seed = tf.random.uniform([2], minval=0, maxval=2**31 - 1, dtype=tf.int32)
    return mean + scale * tf.random.stateless_normal(tf.shape(mean), seed, dtype=mean.dtype)


class Drawing(Case):
    """Draws for the rows of a replica and of a micro-batch, and weights that all rows share."""

    def build_model(self):
        return tf_keras.Sequential([layers.Dense(5), layers.LayerNormalization()])

    @ctl.random.keyed()
    def forward(self, batch, training):
        x = sample(self.model(batch["x"], training=training), 0.3)
        x = tf.nn.dropout(x, 0.25) + tf.random.truncated_normal(tf.shape(x), dtype=x.dtype)
        x += tf.random.stateless_uniform(tf.shape(x), [1, 2], -1.0, 1.0, dtype=x.dtype)
        x *= tf.cast(tf.random.uniform([tf.shape(x)[0], 1], 1, 5, tf.int32), x.dtype)
        x += GENERATOR.normal(tf.shape(x), dtype=x.dtype)
        samples = tf.random.normal([3, tf.shape(x)[0], 5], dtype=x.dtype)  # as of sample(3)
        x += tf.reduce_mean(samples, axis=0)
        kept = tf.random.categorical(x, 3)  # three classes of each row
        x += tf.reduce_sum(tf.one_hot(kept, 5, dtype=x.dtype), axis=1)
        projection = tf.random.normal([5, CLASSES], dtype=x.dtype) + tf.random.normal(
            [], dtype=x.dtype
        )
        return x @ projection


class Generative(Case):
    """Two views, and a generator whose noise meets no row of the batch before the loss."""

    features = ("x", "view", "label")

    def build_model(self):
        return tf_keras.Sequential([layers.Dense(6), ctl.SyncBatchNormalization(), layers.Dense(3)])

    def forward(self, batch, training):
        both = ctl.replica.views(batch["x"], batch["view"])
        with ctl.random.keyed():
            both += tf.random.normal(tf.shape(both), dtype=both.dtype)
            noise = tf.random.normal([tf.shape(batch["x"])[0], 6], dtype=both.dtype)
        first, second = tf.split(self.model(both, training=training), 2)
        return first - second + self.model(noise, training=training)


@pytest.mark.parametrize(
    ("case", "split"),
    [
        (Drawing, Split(2, 7)),
        (Drawing, Split(2, 8, micro_batches=2)),
        (Drawing, Split(2, 8, ragged=True)),
        (Generative, Split(2, 8)),
        (Generative, Split(4, 5)),
    ],
)  # fmt: skip
def test_every_split_trains_as_one_replica(case, split):
    reference = running.train(case, split.reference)
    assert running.difference(reference, running.train(case, split)) <= 1e-12


class Chance(Drawing):
    """A projection whose first size is that of the rows of a replica."""

    @ctl.random.keyed()
    def forward(self, batch, training):
        x = self.model(batch["x"], training=training)
        return x[:, :4] @ tf.random.normal([4, CLASSES], dtype=x.dtype)


class Folded(Drawing):
    @ctl.random.keyed()
    def forward(self, batch, training):
        x = tf.reshape(self.model(batch["x"], training=training)[:, :4], [-1, 2])
        return tf.reshape(x + tf.random.normal(tf.shape(x), dtype=x.dtype), [-1, 4])[:, :CLASSES]


class Mapped(Drawing):
    @ctl.random.keyed()
    def forward(self, batch, training):
        x = self.model(batch["x"], training=training)
        return tf.map_fn(lambda row: row * tf.random.normal([], dtype=x.dtype), x)[:, :CLASSES]


@pytest.mark.parametrize(
    ("case", "message", "rows"),
    [
        (Chance, r"library_draws_test.py:\d+ uses the place of a row among the rows", 8),
        (Folded, r"library_draws_test.py:\d+ .*combines them with rows.* per_row=N", 8),
        (Mapped, r"ctl.random.keyed got a draw in a loop.* shared=True", 8),
        (Drawing, r"ctl.random.keyed got a draw of shape \[1, ...\] for one row", 2),
    ],
)
def test_numbers_that_would_depend_on_the_split_are_one_line(case, message, rows):
    with one_line(message):
        running.train(case, Split(2, rows))


def test_rejected_draws_of_libraries_name_it():
    class Plain(Drawing):
        def forward(self, batch, training):
            return sample(self.model(batch["x"], training=training), 0.3)[:, :CLASSES]

    with pytest.raises(
        ctl.UsageError, match=r"`with ctl.random.keyed\(\):` around the code of a library"
    ):
        running.train(Plain, Split(2, 8))
