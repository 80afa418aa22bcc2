"""The residual network of experiments/fashion_resnet.py, with a small model on few images."""

import struct
import types

import numpy as np
import pytest
import tensorflow as tf

import ctl
from experiments.trainers import fashion_resnet
from tests.gallery import curves

DRAW = np.random.default_rng(0)
IMAGE = DRAW.integers(256, size=(28, 28)).astype(np.uint8)


def test_a_tenth_of_a_label_is_spread_over_the_classes():
    logits = np.zeros((1, 10))
    logits[0, 3] = np.log(11.0)  # probability 11 / 20; 1 / 20 of each other class
    trainer = types.SimpleNamespace(options=ctl.TrainerOptions(model={"label_smoothing": 0.1}))
    batch = {"label": np.array([3])}
    loss = fashion_resnet.FashionResNetTrainer.per_example_loss(trainer, batch, logits)
    expected = 0.91 * np.log(20 / 11) + 0.09 * np.log(20)
    np.testing.assert_allclose(loss, [expected], rtol=1e-12)


def test_an_augmented_image_is_moved_by_up_to_two_pixels_and_may_be_reflected():
    padded = np.pad(IMAGE, 2)
    moved = [padded[y : y + 28, x : x + 28] for y in range(5) for x in range(5)]
    expected = [view.tobytes() for view in [*moved, *(view[:, ::-1] for view in moved)]]
    counts = np.zeros(50, int)
    augment = tf.function(fashion_resnet.augment)
    for number in range(500):
        result = augment({"image": IMAGE, "label": 3}, tf.constant([number, 7], tf.int64))
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
