"""The residual network of experiments/fashion_resnet.py, with a small model on few images."""

import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from experiments.trainers import fashion_resnet
from tests.gallery import curves


class Small(fashion_resnet.FashionResNetTrainer):
    def build_dataset(self, split, input_context):
        source = ctl.data.arrays({"image": curves.IMAGES, "label": curves.LABELS})
        return ctl.data.augmented(source, fashion_resnet.augment)


def train(replicas):
    optimizer = tf_keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
    model = dict(stem=2, widths=(3,), label_smoothing=0.1, sync_batch_norm=True)
    trainer = curves.build(Small, replicas, optimizer, model=model, ema_decay=0.9)
    normalizations = [layer for layer in trainer.model.layers if "batch_norm" in layer.name]
    assert [type(layer) for layer in normalizations] == [ctl.SyncBatchNormalization] * 3
    return curves.train(trainer)


@pytest.mark.slow
def test_the_curve_is_that_of_one_device():
    losses = curves.assert_same(train(1), train(2))
    assert losses[3] < losses[0]


def test_a_tenth_of_a_label_is_spread_over_the_classes():
    logits = np.zeros((1, 10))
    logits[0, 3] = np.log(11.0)  # probability 11 / 20; 1 / 20 of each other class
    trainer = types.SimpleNamespace(options=ctl.TrainerOptions(model={"label_smoothing": 0.1}))
    batch = {"label": np.array([3])}
    loss = fashion_resnet.FashionResNetTrainer.per_example_loss(trainer, batch, logits)
    expected = 0.91 * np.log(20 / 11) + 0.09 * np.log(20)
    np.testing.assert_allclose(loss, [expected], rtol=1e-12)


def test_an_augmented_image_is_moved_by_up_to_two_pixels_and_may_be_reflected():
    padded = np.pad(curves.IMAGES[0], 2)
    moved = [padded[y : y + 28, x : x + 28] for y in range(5) for x in range(5)]
    expected = [view.tobytes() for view in [*moved, *(view[:, ::-1] for view in moved)]]
    counts = np.zeros(50, int)
    augment = tf.function(fashion_resnet.augment)
    for number in range(500):
        result = augment(
            {"image": curves.IMAGES[0], "label": 3}, tf.constant([number, 7], tf.int64)
        )
        counts[expected.index(result["image"].numpy().tobytes())] += 1
        assert result["label"] == 3
    assert counts.min() >= 1 and counts.max() <= 30  # 10 expected
    assert 200 < counts[:25].sum() < 300
