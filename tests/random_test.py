"""Random numbers of users' own code are the same on every split, or the step is rejected."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing

layers = tf_keras.layers
TIME, FEATURES, EXAMPLES = 3, 4, 21
ROWS = 6


@functools.cache
def examples():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(EXAMPLES, TIME, FEATURES)),
        "label": rng.normal(size=(EXAMPLES, 2)),
    }


class Trainer(ctl.StandardTrainer):
    """Regression on [rows, time, features]; subclasses draw random numbers somewhere."""

    def build_model(self):
        return tf_keras.Sequential([layers.Flatten(), layers.Dense(2)])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays(examples())

    def per_example_loss(self, batch, outputs):
        return tf.reduce_mean(tf.square(outputs - batch["label"]), axis=-1)


class DynamicRows:
    """Mixin: batches whose number of rows is known only when the step runs; the last one is partial."""

    def build_dataset(self, split, input_context):
        data = tf.data.Dataset.from_tensor_slices(examples()).repeat(3).batch(ROWS)
        return ctl.data.GlobalBatches(data)


def make(cls, replicas=1, micro_batches=1, batch=ROWS, **options):
    return cls(
        strategy=testing.make_strategy(replicas),
        global_batch_size=batch,
        optimizer=lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
        options=ctl.TrainerOptions(
            precision="float64", gradient_accumulation_steps=micro_batches, **options
        ),
    )


def weights(trainer, steps=3):
    trainer.train(tf.constant(steps))
    return np.concatenate([w.ravel() for w in trainer.model.get_weights()])


SPLITS = [(2, 1), (4, 1), (1, 3)]  # (replicas, micro-batches); 4 replicas share 6 rows unevenly


def check_splits(cls, splits=SPLITS, **options):
    expected = weights(make(cls, **options))
    for replicas, micro_batches in splits:
        actual = weights(make(cls, replicas, micro_batches, **options))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12, err_msg=str(replicas))
    return expected


def check_rejected(cls, message, **options):
    trainer = make(cls, **options)
    with pytest.raises(ctl.UsageError, match=message) as caught:
        trainer.train(tf.constant(1))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Public draws.


class InPreprocess(Trainer):
    def preprocess(self, batch):
        level = ctl.random.uniform([None, 1, 1], maxval=0.5, dtype=tf.float64)
        noise = ctl.random.normal(tf.shape(batch["x"]), dtype=tf.float64, name="noise")
        keep = ctl.random.bernoulli(tf.shape(batch["label"]), 0.8, tf.float64)
        return {**batch, "x": batch["x"] + level * noise, "label": batch["label"] * keep}


class InLoss(Trainer):
    def per_example_loss(self, batch, outputs):
        flip = ctl.random.integers([None], 0, 3)
        scale = ctl.random.beta([], 0.4, 0.4, shared=True, dtype=tf.float64)
        outputs = ctl.random.dropout(outputs, 0.3)
        weight = tf.cast(flip, tf.float64) + scale
        return weight * super().per_example_loss(batch, outputs)


class Noise(layers.Layer):
    """A layer that a user wrote: noise of the shape of its inputs."""

    def call(self, inputs, training=False):
        if not training:
            return inputs
        return inputs + ctl.random.normal(tf.shape(inputs), stddev=0.5, dtype=inputs.dtype)


class InLayer(Trainer):
    def build_model(self):
        return tf_keras.Sequential([Noise(), layers.Flatten(), Noise(), layers.Dense(2)])


class Mixup(Trainer):
    def preprocess(self, batch):
        partners = ctl.random.permutation_of_batch()
        ratio = ctl.random.beta([None, 1], 0.4, 0.4, dtype=tf.float64)

        def mix(x, ratio):
            return ratio * x + (1 - ratio) * tf.gather(ctl.replica.all_gather(x), partners)

        return {"x": mix(batch["x"], ratio[..., None]), "label": mix(batch["label"], ratio)}


PUBLIC = [InPreprocess, InLoss, InLayer, Mixup]


@pytest.mark.parametrize("cls", PUBLIC)
def test_public_draws_are_the_same_on_every_split(cls):
    seed_0 = check_splits(cls)
    assert not np.allclose(seed_0, weights(make(cls, seed=1)))
    assert not np.allclose(seed_0, weights(make(Trainer)))


@pytest.mark.parametrize("cls", PUBLIC)
def test_public_draws_are_the_same_for_a_number_of_rows_that_is_not_static(cls):
    dynamic = type("Dynamic", (DynamicRows, cls), {})
    expected = weights(make(dynamic), 8)  # step 3 is the partial batch
    for replicas in (2, 4):
        np.testing.assert_allclose(
            weights(make(dynamic, replicas), 8), expected, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("xla", ["step", "loop", "gradients"])
def test_public_draws_are_the_same_under_xla(xla):
    np.testing.assert_allclose(
        weights(make(InLoss, xla=xla)), weights(make(InLoss)), rtol=0, atol=1e-6
    )


def test_public_draws_continue_after_a_resume(tmp_path):
    expected = weights(make(InLoss), 5)
    first = make(InLoss)
    first.train(tf.constant(2))
    path = tf.train.Checkpoint(**first.checkpoint_items()).write(str(tmp_path / "ckpt"))
    second = make(InLoss, 2)
    tf.train.Checkpoint(**second.checkpoint_items()).read(path)
    np.testing.assert_allclose(weights(second, 3), expected, rtol=0, atol=1e-12)
