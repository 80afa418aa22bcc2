"""The contrastive learning of experiments/simclr.py, with a small model on few images."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from experiments.trainers import simclr
from tests.gallery import curves
from tests.support import child

MNIST = child.ROOT / "experiments/data/mnist"


def train(replicas):
    trainer = curves.small(simclr.SimclrTrainer, label=curves.LABELS)
    optimizer, model = tf_keras.optimizers.Adam(1e-3), dict(width=4, projection=3, temperature=0.5)
    return curves.train(curves.build(trainer, replicas, optimizer, model=model))


@pytest.mark.slow
def test_the_curve_is_that_of_one_device():
    curves.assert_same(train(1), train(2))


def test_views_without_a_move_are_the_image(monkeypatch):
    values = dict.fromkeys(("angle", "scale", "dx", "dy"), 0.0)

    def draw(shape, low, high, name):
        return tf.constant([values[name.partition("/")[2]]])

    monkeypatch.setattr(ctl.random, "uniform", draw)
    # Scale 0 shows the pixel in the center everywhere, at 13.5: the mean of four.
    image = np.random.default_rng(1).random((1, 28, 28, 1)).astype(np.float32)
    view = simclr.transform(image, "a")
    np.testing.assert_allclose(view, np.full_like(image, image[0, 13:15, 13:15].mean()), rtol=1e-5)
    values |= {"scale": 1.0, "dx": 3.0}
    view = simclr.transform(image, "a").numpy()
    np.testing.assert_allclose(view[0, :, :25], image[0, :, 3:], atol=1e-5)
    assert not view[0, :, 25:].any()


def test_linear_classifier_separates_classes():
    draw = np.random.default_rng(0)
    centers, labels = 5 * draw.normal(size=(10, 12)), draw.integers(10, size=400)
    features = centers[labels] + draw.normal(size=(400, 12))
    weights = simclr.fit(features[:300], labels[:300])
    predicted = (simclr.with_bias(features[300:]) @ weights).argmax(axis=1)
    assert np.mean(predicted == labels[300:]) > 0.95


@pytest.mark.slow
def test_an_evaluation_measures_the_features(monkeypatch):
    curves.use_few_images(monkeypatch, 500)
    model, data = dict(width=8, projection=3, temperature=0.5), dict(dir=str(MNIST))
    optimizer = tf_keras.optimizers.Adam(1e-3)
    trainer = curves.build(simclr.SimclrTrainer, 1, optimizer, batch=32, model=model, data=data)
    results = ctl.StandardEvaluator(trainer, global_batch_size=200).evaluate(tf.constant(-1))
    assert results["probe_accuracy"] > 0.2
