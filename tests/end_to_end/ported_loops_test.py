"""Loops of several models, ported to one `ctl.Step` for each, train as the plain loop on one device.

A DCGAN with gradient penalty, and a WGAN-GP with several critic steps, as their users write them: all
steps in one `tf.function`, random numbers by `ctl.random`, batches of 5 rows, of which 2 replicas hold 3
and 2. Each runs at the first try.
"""

from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.rows import row_mask

BATCH = 5
DRAW = np.random.default_rng(0)
IMAGES = DRAW.normal(size=(10, 4, 4, 1))
POINTS = DRAW.normal(size=(10, 3))
LONG = (pytest.mark.slow, pytest.mark.long)
layers, Adam = tf_keras.layers, tf_keras.optimizers.Adam


def softplus(scores):
    return tf.nn.softplus(scores)[:, 0]


def normal(rows, size):
    return ctl.random.normal([tf.shape(rows)[0], size], dtype=tf.float64)


def penalty(critic, points):
    """The squared norm of the gradient of each row's score."""
    with tf.GradientTape() as tape:
        tape.watch(points)
        scores = critic(points, training=True)
    gradient = tape.gradient(scores, points)
    return tf.reduce_sum(gradient**2, axis=range(1, gradient.shape.rank))


class Dcgan:
    data: ClassVar = {"image": IMAGES}

    def __init__(self, norm):
        self.generator = tf_keras.Sequential([
            layers.Dense(8, use_bias=False, input_shape=[3]), norm(momentum=0.5), layers.LeakyReLU(),
            layers.Reshape([2, 2, 2]), layers.Conv2DTranspose(1, 4, 2, "same", activation="tanh"),
        ])  # fmt: skip
        self.critic = tf_keras.Sequential([
            layers.Conv2D(3, 3, 2, "same", input_shape=[4, 4, 1]), layers.LeakyReLU(),
            layers.Flatten(), layers.Dense(1),
        ])  # fmt: skip
        self.models = self.critic, self.generator
        self.optimizers = Adam(2e-3), Adam(1e-3)
        self.losses = self.critic_loss, self.generator_loss

    def generate(self, batch):
        return self.generator(normal(batch["image"], 3), training=True)

    def critic_loss(self, batch):
        image = batch["image"]
        scores = self.critic(self.generate(batch), training=True)
        real = self.critic(image, training=True)
        return softplus(scores) + softplus(-real) + 5 * penalty(self.critic, image)

    def generator_loss(self, batch):
        return softplus(-self.critic(self.generate(batch), training=True))

    def step(self, steps, batch):
        for each in steps:
            each(batch)


class WganGp(Dcgan):
    data: ClassVar = {"image": POINTS}

    def __init__(self, norm):
        dense = layers.Dense
        self.generator = tf_keras.Sequential([dense(4, "tanh", input_shape=[3]), dense(3)])
        self.critic = tf_keras.Sequential([dense(4, "tanh", input_shape=[3]), dense(1)])
        self.models = self.critic, self.generator
        self.optimizers = Adam(2e-3, beta_1=0.0), Adam(1e-3, beta_1=0.0)
        self.losses = self.critic_loss, self.generator_loss

    def critic_loss(self, batch):
        real, fake = batch["image"], self.generate(batch)
        share = ctl.random.uniform([tf.shape(real)[0], 1], dtype=tf.float64)
        norm = tf.sqrt(penalty(self.critic, share * real + (1 - share) * fake))
        return self.critic(fake)[:, 0] - self.critic(real)[:, 0] + 10 * (norm - 1) ** 2

    def generator_loss(self, batch):
        return -self.critic(self.generate(batch))[:, 0]

    def step(self, steps, batch):
        critic, generator = steps
        for _ in range(3):  # n_critic
            critic(batch)
        generator(batch)


def values(loop):
    return [w for model in loop.models for w in model.get_weights()]


def train_plainly(kind):
    """In plain TensorFlow, on one device; only the numbers are drawn by ctl, as a step draws them."""
    tf_keras.utils.set_random_seed(0)
    loop = kind(layers.BatchNormalization)

    def updates():
        for model, optimizer, loss in zip(loop.models, loop.optimizers, loop.losses, strict=True):

            def update(batch, model=model, optimizer=optimizer, loss=loss, count=[0]):  # noqa: B006
                with row_mask.examples(count=BATCH, step=count[0]), tf.GradientTape() as tape:
                    value = tf.reduce_mean(loss(batch))
                count[0] += 1
                variables = model.trainable_variables
                gradients = tape.gradient(value, variables)
                optimizer.apply_gradients(zip(gradients, variables, strict=True))

            yield update

    steps = list(updates())
    for batch in tf.data.Dataset.from_tensor_slices(kind.data).batch(BATCH):
        loop.step(steps, batch)
    return values(loop)


def make_steps(loop, strategy, size):
    return [
        ctl.Step(
            model, optimizer, lambda batch, outputs: outputs,
            forward=lambda batch, training, loss=loss: loss(batch),
            models=[each for each in loop.models if each is not model],
            global_batch_size=size, strategy=strategy,
        )
        for model, optimizer, loss in zip(loop.models, loop.optimizers, loop.losses, strict=True)
    ]  # fmt: skip


def train_by_steps(kind, strategy):
    tf_keras.utils.set_random_seed(0)
    with strategy.scope():
        loop = kind(ctl.SyncBatchNormalization)
    steps = make_steps(loop, strategy, BATCH)

    @tf.function
    def train(batch):
        loop.step(steps, batch)

    data = tf.data.Dataset.from_tensor_slices(kind.data).batch(BATCH)
    for batch in strategy.experimental_distribute_dataset(data):
        train(batch)
    return values(loop)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=LONG), 2])
@pytest.mark.parametrize("kind", [Dcgan, pytest.param(WganGp, marks=LONG)])
def test_steps_in_one_function_train_as_the_plain_loop(kind, replicas, caplog):
    tf_keras.backend.set_floatx("float64")
    try:
        expected = train_plainly(kind)
        found = train_by_steps(kind, testing.make_strategy(replicas))
    finally:
        tf_keras.backend.set_floatx("float32")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    assert "cannot check" not in caplog.text
