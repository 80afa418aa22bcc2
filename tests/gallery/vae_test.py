"""The variational autoencoder of experiments/vae.py, with a small model on few images."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import main, testing
from experiments.trainers import vae
from tests import child, one_batch
from tests.experiments import read_result

IMAGES = np.random.default_rng(0).integers(256, size=(23, 28, 28)).astype(np.uint8)


class Small(vae.VaeTrainer):
    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"image": IMAGES})


@functools.cache
def make(replicas, batch=7):
    tf_keras.backend.reset_uids()
    tf_keras.utils.set_random_seed(1)
    return Small(
        strategy=one_batch.strategy(replicas),
        global_batch_size=batch,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-3),
        options=ctl.TrainerOptions(precision="float64", model=dict(hidden=5, latent=3)),
    )


@functools.cache
def train(replicas):
    """Each replica's copies of the variables after 20 steps, and the losses."""
    trainer = make(replicas)
    losses = [float(trainer.train(tf.constant(5))["loss"]) for _ in range(4)]
    evaluation = ctl.StandardEvaluator(trainer, global_batch_size=4).evaluate(tf.constant(-1))
    copies = [testing.copies(trainer.strategy, v) for v in trainer.model.trainable_variables]
    return copies, [*losses, float(evaluation["loss"])]


@pytest.mark.slow
def test_the_curve_is_that_of_one_device():
    expected, expected_losses = train(1)
    actual, losses = train(2)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-10)
    assert losses[3] < losses[0]
    for (value,), copies in zip(expected, actual, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-10)


def test_loss_is_the_negative_evidence_lower_bound():
    trainer = make(1)
    logits = np.full((2, 28, 28), np.log(3))  # probability 3/4
    images = np.zeros((2, 28, 28))
    images[1] = 1
    mean, log_variance = np.array([[2.0, 0, 0], [0, 0, 0]]), np.log([[1.0, 4, 1], [1, 1, 1]])
    losses = trainer.per_example_loss({"image": images}, (logits, mean, log_variance))
    divergence = 2.0**2 / 2 + (4 - 1 - np.log(4)) / 2  # of normal distributions, by hand
    expected = [784 * np.log(4) + divergence, 784 * np.log(4 / 3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_the_experiment_trains_and_writes_samples(tmp_path, monkeypatch):
    monkeypatch.chdir(child.ROOT)
    keys = {"train.steps": 20, "train.steps_per_loop": 10, "eval.interval": 20, "model.hidden": 20}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    flags += ["--config=experiments/vae.py", f"--workdir={tmp_path}"]
    assert main.run(["ctl", *flags]) == 0
    assert read_result(tmp_path)["eval"]["loss"] < 500  # 784 log 2 = 543 without training
    tags = {
        value.tag
        for path in tmp_path.glob("summaries/**/events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }
    assert any(tag.startswith("samples") for tag in tags)
