"""The adversarial network of experiments/dcgan.py, with small models on few images."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import main, testing
from experiments.trainers import dcgan
from tests import child, one_batch
from tests.experiments import read_result

IMAGES = np.random.default_rng(0).integers(256, size=(23, 28, 28)).astype(np.uint8)
PROJECTION = np.random.default_rng(1).normal(size=(28 * 28, 5)) / 28


class Small(dcgan.DcganTrainer):
    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"image": IMAGES})


def make(replicas, *, penalty=1.0):
    tf_keras.backend.reset_uids()
    tf_keras.utils.set_random_seed(1)
    return Small(
        strategy=one_batch.strategy(replicas),
        global_batch_size=7,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-3, beta_1=0.5),
        options=ctl.TrainerOptions(
            precision="float64",
            ema_decay=0.9,
            data=dict(dir=""),
            model=dict(latent=3, width=2, penalty=penalty),
        ),
    )


def copies(trainer):
    variables = [*trainer.model.variables, *trainer.discriminator.variables]
    return [testing.copies(trainer.strategy, variable) for variable in variables]


@functools.cache
def train(replicas):
    """Each replica's copies of the variables after 20 steps, and the losses and the distance."""
    trainer = make(replicas)
    losses = []
    for _ in range(4):
        outputs = trainer.train(tf.constant(5))
        losses += [float(outputs["loss"]), float(outputs["discriminator_loss"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dcgan, "make_features", lambda folder: lambda x: x.reshape(-1, 28 * 28) @ PROJECTION
        )
        results = ctl.StandardEvaluator(trainer, global_batch_size=4).evaluate(tf.constant(-1))
    return copies(trainer), [*losses, float(results["frechet_distance"])]


@pytest.mark.slow
def test_the_curves_are_those_of_one_device():
    expected, expected_losses = train(1)
    actual, losses = train(2)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-10)
    before = copies(make(1))
    for (value,), each, (old,) in zip(expected, actual, before, strict=True):
        assert len(each) == 2 and np.abs(value - old).max() > 1e-4
        for copy in each:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-10)


def test_both_networks_are_trained():
    values, losses = train(1)
    assert np.isfinite(losses).all() and len(set(losses)) == len(losses)
    for (value,), (old,) in zip(values, copies(make(1)), strict=True):
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
    monkeypatch.chdir(child.ROOT)
    keys = {"train.steps": 4, "train.steps_per_loop": 2, "eval.interval": 4, "model.width": 4}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    flags += ["--config=experiments/dcgan.py", f"--workdir={tmp_path}"]
    assert main.run(["ctl", *flags]) == 0
    assert 100 < read_result(tmp_path)["eval"]["frechet_distance"] < 400
    tags = {
        value.tag
        for path in tmp_path.glob("summaries/**/events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }
    assert any(tag.startswith("samples") for tag in tags)
