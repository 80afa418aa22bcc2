"""A loop of two models, ported to one `ctl.Step` for each, trains as the plain loop on one device.

A DCGAN with gradient penalty and several critic steps, as its users write it: all steps in one
`tf.function`, random numbers by `ctl.random`, batches of 5 rows, of which 2 replicas hold 3 and 2.
docs/port-your-loop.md has a WGAN-GP.
"""

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
layers, Adam = tf_keras.layers, tf_keras.optimizers.Adam


def softplus(scores):
    return tf.nn.softplus(scores)[:, 0]


def penalty(critic, points):
    """The squared norm of the gradient of each row's score."""
    with tf.GradientTape() as tape:
        tape.watch(points)
        scores = critic(points, training=True)
    gradient = tape.gradient(scores, points)
    return tf.reduce_sum(gradient**2, axis=range(1, gradient.shape.rank))


class Dcgan:
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
        noise = ctl.random.normal([tf.shape(batch["image"])[0], 3], dtype=tf.float64)
        return self.generator(noise, training=True)

    def critic_loss(self, batch):
        image = batch["image"]
        scores = self.critic(self.generate(batch), training=True)
        real = self.critic(image, training=True)
        return softplus(scores) + softplus(-real) + 5 * penalty(self.critic, image)

    def generator_loss(self, batch):
        return softplus(-self.critic(self.generate(batch), training=True))

    def step(self, steps, batch):
        critic, generator = steps
        for _ in range(2):  # n_critic
            critic(batch)
        generator(batch)


def values(loop):
    return [w for model in loop.models for w in model.get_weights()]


def batches():
    return tf.data.Dataset.from_tensor_slices({"image": IMAGES}).batch(BATCH)


def train_plainly():
    """In plain TensorFlow, on one device; only the numbers are drawn by ctl, as a step draws them."""
    tf_keras.utils.set_random_seed(0)
    loop = Dcgan(layers.BatchNormalization)

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
    for batch in batches():
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


def train_by_steps(strategy):
    tf_keras.utils.set_random_seed(0)
    with strategy.scope():
        loop = Dcgan(ctl.SyncBatchNormalization)
    steps = make_steps(loop, strategy, BATCH)

    @tf.function
    def train(batch):
        loop.step(steps, batch)

    for batch in strategy.experimental_distribute_dataset(batches()):
        train(batch)
    return values(loop)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.long), 2])
def test_steps_in_one_function_train_as_the_plain_loop(replicas, caplog):
    tf_keras.backend.set_floatx("float64")
    try:
        expected = train_plainly()
        found = train_by_steps(testing.make_strategy(replicas))
    finally:
        tf_keras.backend.set_floatx("float32")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    assert "cannot check" not in caplog.text
