"""A model of tokens that averages within segments, and its data, for the tests of this folder."""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.data import distribution
from ctl.data.kinds import kind_of
from ctl.data.layout import Layout
from ctl.loop.actions import leaks as retraces
from tests.data.reading import UNEVEN, pipeline_layouts, read_steps, real_ids

TOKENS, WIDTH = 11, 4


def documents(count=40, longest=12, seed=0):
    """Sequences of different lengths, of which some are empty: {"x": [...], "label": [...]}."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(1, TOKENS, rng.integers(0, longest) + 1) for _ in range(count)]
    return {"x": [text[:-1] for text in texts], "label": [text[1:] for text in texts]}


class Documents(ctl.data.RowSource):
    """The same documents, parsed one by one."""

    def __init__(self, count=40):
        data = documents(count)
        self._x = tf.ragged.constant([list(x) for x in data["x"]], tf.int64)
        self._label = tf.ragged.constant([list(x) for x in data["label"]], tf.int64)

    def __len__(self):
        return int(self._x.nrows())

    def read(self, indexes):
        return indexes

    def parse(self, row):
        return {"x": self._x[row], "label": self._label[row]}


class TokenTrainer(ctl.StandardTrainer):
    """Predicts the label of each token from the tokens of its segment."""

    data_factory = staticmethod(lambda: None)

    def build_model(self):
        layers = tf_keras.layers
        x = tf_keras.Input([None], dtype=tf.int64)
        segment = tf_keras.Input([None], dtype=tf.int32)
        position = tf_keras.Input([None], dtype=tf.int32)
        hidden = layers.Embedding(TOKENS, WIDTH)(x) + layers.Embedding(64, WIDTH)(position)
        is_same = tf.cast(segment[:, :, tf.newaxis] == segment[:, tf.newaxis, :], hidden.dtype)
        shares = is_same / tf.reduce_sum(is_same, axis=-1, keepdims=True)
        outputs = layers.Dense(TOKENS)(hidden + tf.tanh(tf.matmul(shares, hidden)))
        return tf_keras.Model({"x": x, "segment_ids": segment, "positions": position}, outputs)

    def build_dataset(self, split, input_context):
        return self.data_factory()

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )


def make_trainer(factory, batch, replicas, **options):
    """Makes a trainer in float64 of the data that `factory()` returns."""
    return type("Tokens", (TokenTrainer,), {"data_factory": staticmethod(factory)})(
        strategy=testing.make_strategy(replicas),
        global_batch_size=batch,
        optimizer=lambda: tf_keras.optimizers.SGD(0.5),
        options=ctl.TrainerOptions(precision="float64", **options),
    )


def train(factory, batch, replicas, steps):
    """Trains one step per loop; returns the losses, each replica's variables, and the trainer."""
    trainer = make_trainer(factory, batch, replicas)
    losses = [float(trainer.train(tf.constant(1))["loss"]) for _ in range(steps)]
    return losses, [testing.copies(trainer.strategy, v) for v in trainer.model.variables], trainer


def check_guarantee(factory, batch, replicas, steps):
    """Checks the loss against numpy, and the update against that of one replica."""
    untrained = make_trainer(factory, batch, 1)
    stream = kind_of(factory()).training(Layout(batch, 1), seed=0, start=0)
    first = next(iter(distribution.disable_autotune(stream.take(1)))).batch
    outputs, weights = untrained.forward(first, training=True), first["weight"].numpy()
    losses = untrained.per_example_loss(first, outputs).numpy()
    expected, values, _ = train(factory, batch, 1, steps)
    np.testing.assert_allclose(expected[0], (weights * losses).sum() / weights.sum(), rtol=1e-13)
    trained, variables, trainer = train(factory, batch, replicas, steps)
    np.testing.assert_allclose(trained, expected, rtol=0, atol=1e-13)
    for copies, (value,) in zip(variables, values, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-13)
    functions = retraces._list_functions(trainer, None)
    assert {f.experimental_get_tracing_count() for _, f in functions} == {1}


def check_order(factory, *, name="x"):
    """Checks the rows of resumed steps on replicas with uneven shares against those of one."""

    def read(layouts, start, steps):
        streams = [kind_of(factory()).training(x, seed=3, start=start) for x in layouts]
        return [real_ids(step, name) for step in read_steps(streams, layouts[0], steps)]

    expected = read([Layout(UNEVEN[0], 1)], 0, 12)[7:]
    for rows, values in zip(read(pipeline_layouts(*UNEVEN), 7, 5), expected, strict=True):
        np.testing.assert_array_equal(rows, values)
