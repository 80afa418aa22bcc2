"""The adversarial network of experiments/dcgan.py, with small models on few images."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from experiments.trainers import dcgan
from tests.gallery import curves


def make(replicas, *, penalty=1.0):
    trainer, optimizer = curves.small(dcgan.DcganTrainer), tf_keras.optimizers.Adam(1e-3, 0.5)
    model = dict(latent=3, width=2, penalty=penalty)
    return curves.build(trainer, replicas, optimizer, ema_decay=0.9, model=model)


@functools.cache
def train(replicas):
    return curves.train(make(replicas))


@pytest.mark.slow
def test_the_curves_are_those_of_one_device():
    curves.assert_same(train(1), train(2))


@pytest.mark.slow
def test_both_networks_are_trained():
    values, results = train(1)
    losses = [value for result in results for value in result.values()]
    assert np.isfinite(losses).all()
    for (value,), (old,) in zip(values, curves.variables(make(1)), strict=True):
        assert np.abs(value - old).max() > 1e-4


def test_penalty_is_half_the_squared_gradient_at_the_real_image():
    trainer = make(1, penalty=3.0)
    with trainer.build_scope():
        trainer.discriminator = tf_keras.Sequential(
            [tf_keras.layers.Flatten(), tf_keras.layers.Dense(1, kernel_initializer="ones")]
        )
    trainer.forward = lambda batch, training: tf.zeros([2, 28, 28, 1], tf.float64)
    pixels = np.zeros((2, 28, 28))
    pixels[1, 0, :2] = 0.5
    losses = trainer.discriminator_losses({"image": tf.constant(pixels)})
    real = np.log1p(np.exp([-0.0, -1.0]))  # the logit is the sum of the pixels, its gradient is 1
    np.testing.assert_allclose(losses, real + np.log(2) + 3 / 2 * 28 * 28, rtol=1e-12)


def test_distance_of_two_samples_by_hand():
    sample = np.random.default_rng(0).normal(size=(50, 4))
    sample[:, 1] += sample[:, 0]
    assert dcgan.frechet_distance(sample, sample) == pytest.approx(0, abs=1e-10)
    # The covariance C becomes 4 C, whose root with C is 2 C: tr(C + 4 C - 2 * 2 C) = tr(C).
    trace = sample.var(axis=0, ddof=1).sum()
    mean = np.sum((sample.mean(axis=0) + 3) ** 2)
    assert dcgan.frechet_distance(sample, 2 * sample + 3) == pytest.approx(mean + trace, rel=1e-9)


@pytest.mark.slow
def test_the_experiment_trains_writes_samples_and_measures_them(tmp_path, monkeypatch):
    curves.use_few_images(monkeypatch, 5000)
    keys = {"train.steps": 4, "train.steps_per_loop": 2, "eval.interval": 4, "model.width": 4}
    result = curves.run_experiment("dcgan", tmp_path, keys)
    assert 100 < result["eval"]["frechet_distance"] < 400
    assert any(tag.startswith("samples") for tag, _ in curves.summaries(tmp_path))
