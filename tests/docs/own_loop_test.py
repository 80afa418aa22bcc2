"""The loops in docs/own-loop.md compute the update of one device."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from tests.docs import pages

pytestmark = pytest.mark.slow
BATCH = 6
IMAGES = np.random.default_rng(0).normal(size=(27, 3))  # the last batch is partial
LABELS = np.arange(27) % 4


def make_model():
    tf_keras.utils.set_random_seed(0)
    return tf_keras.Sequential([tf_keras.layers.Dense(5, "tanh"), tf_keras.layers.Dense(4)])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names of the page; its first loop has trained on one replica."""
    return pages.run(
        "own-loop", make_strategy=tf.distribute.get_strategy, make_model=make_model, images=IMAGES,
        labels=LABELS, noise=IMAGES.astype(np.float32), real=np.zeros((27, 4), np.float32),
        WORKDIR=tmp_path_factory.mktemp("page"),
    )  # fmt: skip


@pytest.fixture
def float64():
    tf_keras.backend.set_floatx("float64")
    yield
    tf_keras.backend.set_floatx("float32")


def train_loader(names, strategy):
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(BATCH)
    if strategy.num_replicas_in_sync > 1:
        data = strategy.experimental_distribute_dataset(data)
    return names["train"](strategy, data)


def test_loop_over_a_data_loader_computes_the_update_of_one_device(page, float64):
    one, two = (
        np.concatenate([v.numpy().ravel() for v in train_loader(page, strategy).weights])
        for strategy in map(testing.make_strategy, (1, 2))
    )
    np.testing.assert_allclose(two, one, atol=1e-12)


def test_evaluation_of_the_page_has_every_example(page):
    assert page["results"]["examples"] == len(IMAGES)
    assert isinstance(page["step"], ctl.Step)


def test_steps_of_the_gan_have_one_checkpoint(page):
    steps = page["generator_step"], page["critic_step"]
    for step in steps:
        step.global_step.assign(0)
    page["checkpoints"].all_restore_latest()
    assert [step.global_step.numpy() for step in steps] == [20, 20]


def test_actor_and_critic_of_the_page_train_by_one_step(page):
    (_, actor), (_, critic) = page["both"].updates.values()
    assert (actor.iterations, critic.iterations) == (2, 4)
