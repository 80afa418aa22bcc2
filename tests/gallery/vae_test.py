"""The variational autoencoder of experiments/vae.py, with a small model on few images."""

import numpy as np
import pytest
import tf_keras

from experiments.trainers import vae
from tests.gallery import curves


def train(replicas):
    optimizer, model = tf_keras.optimizers.Adam(1e-3), dict(hidden=5, latent=3)
    small = curves.small(vae.VaeTrainer)
    return curves.train(curves.build(small, replicas, optimizer, model=model))


@pytest.mark.slow
def test_the_curve_is_that_of_one_device():
    losses = curves.assert_same(train(1), train(2))
    assert losses[3] < losses[0]


def test_loss_is_the_negative_evidence_lower_bound():
    logits = np.full((2, 28, 28), np.log(3))  # probability 3/4
    images = np.zeros((2, 28, 28))
    images[1] = 1
    mean, log_variance = np.array([[2.0, 0, 0], [0, 0, 0]]), np.log([[1.0, 4, 1], [1, 1, 1]])
    outputs = (logits, mean, log_variance)
    losses = vae.VaeTrainer.per_example_loss(None, {"image": images}, outputs)
    divergence = 2.0**2 / 2 + (4 - 1 - np.log(4)) / 2  # of normal distributions, by hand
    expected = [784 * np.log(4) + divergence, 784 * np.log(4 / 3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


@pytest.mark.slow
def test_the_experiment_trains_and_writes_samples(tmp_path):
    keys = {"train.steps": 20, "train.steps_per_loop": 10, "eval.interval": 20, "model.hidden": 20}
    result = curves.run_experiment("vae", tmp_path, keys)
    assert result["eval"]["loss"] < 500  # 784 log 2 = 543 without training
    assert any(tag.startswith("samples") for tag, _ in curves.summaries(tmp_path))
