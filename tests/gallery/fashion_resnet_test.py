"""The residual network of experiments/fashion_resnet.py, with a small model on few images."""

import functools
import struct

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from experiments.trainers import fashion_resnet
from tests.gallery import curves

DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(256, size=(23, 28, 28)).astype(np.uint8)
LABELS = DRAW.integers(10, size=23).astype(np.int32)
MODEL = dict(stem=2, widths=(3,), label_smoothing=0.1, sync_batch_norm=True)


class Small(fashion_resnet.FashionResNetTrainer):
    def build_dataset(self, split, input_context):
        source = ctl.data.arrays({"image": IMAGES, "label": LABELS})
        return ctl.data.augmented(source, fashion_resnet.augment) if split == "train" else source


@functools.cache
def make(replicas):
    optimizer = tf_keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
    return curves.build(Small, replicas, optimizer, model=MODEL, ema_decay=0.9)


@pytest.mark.slow
def test_the_curve_is_that_of_one_device():
    losses = curves.assert_same(*(curves.train(make(replicas)) for replicas in (1, 2)))
    assert losses[3] < losses[0]


@pytest.mark.slow
def test_the_statistics_are_those_of_the_global_batch():
    normalizations = [v for v in make(1).model.layers if "batch_norm" in v.name]
    assert len(normalizations) == 3
    assert all(type(layer) is ctl.SyncBatchNormalization for layer in normalizations)


def test_a_tenth_of_a_label_is_spread_over_the_classes():
    logits = np.zeros((1, 10))
    logits[0, 3] = np.log(11.0)  # probability 11 / 20; 1 / 20 of each other class
    loss = make(1).per_example_loss({"label": np.array([3])}, logits)
    expected = 0.91 * np.log(20 / 11) + 0.09 * np.log(20)
    np.testing.assert_allclose(loss, [expected], rtol=1e-12)


def test_an_augmented_image_is_moved_by_up_to_two_pixels_and_may_be_reflected():
    image = IMAGES[0]
    padded = np.pad(image, 2)
    moved = [padded[y : y + 28, x : x + 28] for y in range(5) for x in range(5)]
    expected = [view.tobytes() for view in [*moved, *(view[:, ::-1] for view in moved)]]
    counts = np.zeros(50, int)
    augment = tf.function(fashion_resnet.augment)
    for number in range(500):
        result = augment({"image": image, "label": 3}, tf.constant([number, 7], tf.int64))
        counts[expected.index(result["image"].numpy().tobytes())] += 1
        assert result["label"] == 3
    assert counts.min() >= 1 and counts.max() <= 30  # 10 expected
    assert 200 < counts[:25].sum() < 300


def write_idx(folder, prefix, count):
    """Writes images and labels in the format of Fashion-MNIST."""
    labels = np.arange(count) % 10
    images = DRAW.integers(64, size=(count, 28, 28)) + 19 * labels[:, np.newaxis, np.newaxis]
    for name, values in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
        header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
        (folder / f"{prefix}-{name}").write_bytes(header + values.astype(np.uint8).tobytes())


@pytest.mark.slow
def test_the_experiment_trains_and_keeps_the_best_checkpoint(tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    write_idx(data, "train", 80)
    write_idx(data, "t10k", 30)
    keys = {
        "data.dir": data, "data.global_batch_size": 20, "model.stem": 2, "model.widths": "(3, 4)",
        "train.steps": 6, "train.steps_per_loop": 3, "eval.interval": 3,
        "optimizer.warmup_steps": 2,
    }  # fmt: skip
    result = curves.run_experiment("fashion_resnet", run, keys)
    assert result["step"] == 6 and result["eval"]["examples"] == 30
    assert result["best"]["metric"] == "eval/accuracy"
    assert (run / f"best/ckpt-{result['best']['step']}.index").exists()
