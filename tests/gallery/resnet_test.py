"""The ResNet of experiments/resnet50.py, on small images."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras.src.applications import resnet as networks

from ctl.layers import recompute
from experiments.trainers import resnet
from tests.gallery import curves

MODEL = dict(size=32, classes=10, sync_batch_norm=True)


def build_one_block(**arguments):
    """A residual block as in ResNet-50, between its first and its last layers."""

    def stack(x):
        return networks.stack1(x, 2, 1, stride1=1, name="conv2")

    return networks.ResNet(stack, preact=False, use_bias=True, model_name="one_block", **arguments)


def make(switch, *, replicas=1, batch=4):
    optimizer = tf_keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True)
    model = {**MODEL, "recompute": switch}
    return curves.build(resnet.ResNetTrainer, replicas, optimizer, batch=batch, model=model)


@functools.cache
def train_one_block(replicas, switch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf_keras.applications, "ResNet50", build_one_block)
        trainer = make(switch, replicas=replicas, batch=5)
    with recompute.detect_use() as used:
        results = curves.train(trainer)
        assert used() == bool(switch)
    assert len({round(result["loss"], 6) for result in results[1]}) == 4
    return results


@pytest.mark.slow
@pytest.mark.long
def test_the_recomputed_curve_of_two_replicas_is_that_of_one_device():
    curves.assert_same(train_one_block(1, ""), train_one_block(2, "blocks"))


@pytest.mark.slow
def test_recomputed_blocks_are_trained():
    values, _ = train_one_block(1, "blocks")
    assert all(np.isfinite(value).all() for (value,) in values)


def test_the_class_of_an_image_is_its_bright_row():
    batch = resnet.NoisyClasses(50, size=32, classes=10).gather(tf.constant([3, 17], tf.int64))
    np.testing.assert_array_equal(batch["label"], [3, 7])
    brightness = batch["image"].numpy().astype(float).mean(axis=(2, 3))
    np.testing.assert_array_equal(brightness.argmax(axis=1), [3, 7])
