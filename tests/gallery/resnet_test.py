"""The ResNet of experiments/resnet50.py, on small images."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras.src.applications import resnet as networks

from ctl.replica.layers import recompute
from experiments.trainers import resnet
from tests.gallery import curves


def build_one_block(**arguments):
    """A residual block as in ResNet-50, between its first and its last layers."""
    return networks.ResNet(
        lambda x: networks.stack1(x, 2, 1, stride1=1, name="conv2"),
        preact=False,
        use_bias=True,
        model_name="one_block",
        **arguments,
    )


@pytest.mark.slow
def test_recomputed_blocks_are_trained(monkeypatch):
    monkeypatch.setattr(tf_keras.applications, "ResNet50", build_one_block)
    optimizer = tf_keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True)
    model = dict(size=32, classes=10, sync_batch_norm=True, recompute="blocks")
    trainer = curves.build(resnet.ResNetTrainer, 1, optimizer, batch=5, model=model)
    with recompute.detect_use() as used:
        values, results = curves.train(trainer, eval_batch=0)
        assert used()
    assert len({round(result["loss"], 6) for result in results}) == 4
    assert all(np.isfinite(value).all() for (value,) in values)


def test_the_class_of_an_image_is_its_bright_row():
    batch = resnet.NoisyClasses(50, size=32, classes=10).gather(tf.constant([3, 17], tf.int64))
    np.testing.assert_array_equal(batch["label"], [3, 7])
    brightness = batch["image"].numpy().astype(float).mean(axis=(2, 3))
    np.testing.assert_array_equal(brightness.argmax(axis=1), [3, 7])
