"""Each optimizer computes the library's own numbers on two replicas and two micro-batches."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import optimizers, testing
from ctl.built.inner_loop import loop_of
from ctl.optimizers import making

STEPS, BATCH = 12, 7  # the replicas have 4 + 3 rows

# An embedding has sparse gradients. The rates are such that the weights move.
CHANGES = {
    "lars": dict(learning_rate=2.0, momentum=0.5, weight_decay=0.125),
    "lamb": dict(learning_rate=0.05, weight_decay=0.125),
    "sgd": dict(learning_rate=0.125, momentum=0.5, arguments=dict(nesterov=True)),
    "rmsprop": dict(learning_rate=0.05, momentum=0.5),
    "adafactor": dict(learning_rate=0.5),
    "adadelta": dict(learning_rate=2.0),
}


class Embedded(ctl.StandardTrainer):
    def build_model(self):
        tokens = tf_keras.Input([2], dtype=tf.int32)
        hidden = tf_keras.layers.Flatten()(tf_keras.layers.Embedding(7, 3)(tokens))
        hidden = tf_keras.layers.Dense(5, activation="tanh")(hidden)
        return tf_keras.Model(tokens, tf_keras.layers.Dense(3)(hidden))

    def build_dataset(self, split, input_context):
        draw = np.random.default_rng(0)
        return ctl.data.arrays(
            {"x": draw.integers(0, 7, (21, 2)), "label": draw.integers(0, 3, 21)}
        )

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )


def make(name):
    changes = {"learning_rate": 0.05, **CHANGES.get(name, {})}
    section = ctl.config(optimizer=dict(name=name, **changes)).optimizer
    return functools.partial(making.make, section, global_batch_size=BATCH, steps=STEPS)


def make_trainer(name, replicas, **options):
    return Embedded(
        strategy=testing.make_strategy(replicas),
        global_batch_size=BATCH,
        optimizer=make(name),
        options=ctl.TrainerOptions(precision="float64", **options),
    )


@functools.cache
def library(name):
    """The weights after the same batches on one device, by nothing but tf_keras."""
    trainer = make_trainer(name, 1)
    model, optimizer = trainer.model, trainer.optimizer
    pipeline = loop_of(trainer).pipeline
    for step in range(STEPS):
        batch = pipeline.data("train").source.gather(
            tf.constant(pipeline.example_indexes(BATCH, step))
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(trainer.per_example_loss(batch, model(batch["x"])))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model.get_weights()


LONG = {"adam", "adamw", "adagrad", "adamax"}  # many other tests compare replicas under such ones


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in optimizers.CLASSES],
)
def test_update_is_that_of_the_library_on_one_device(name):
    trainer = make_trainer(name, 2, micro_batches=2)
    before = trainer.model.get_weights()
    trainer.train(tf.constant(STEPS))
    for start, end, expected in zip(
        before, trainer.model.get_weights(), library(name), strict=True
    ):
        np.testing.assert_allclose(end, expected, rtol=0, atol=1e-10)
        assert np.abs(end - start).max() > 1e-3  # so that the comparison means something
    for variable in (*trainer.model.variables, *trainer.optimizer.variables):
        first, *others = testing.copies(trainer.strategy, variable)
        for other in others:
            np.testing.assert_array_equal(first, other)
