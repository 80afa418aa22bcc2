"""ctl.data.image_folder: images in one subfolder per class."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import batching, elements
from ctl.data.layout import Layout


@pytest.fixture
def folder(tmp_path):
    """Three classes; image i of class c has the grey value 50 c + 10 i and its own size."""
    for label, name in enumerate(["cat", "dog", "eel"]):
        (tmp_path / name).mkdir()
        for number in range(label + 1):
            grey = tf.cast(50 * label + 10 * number, tf.uint8)
            image = tf.fill([6 + number, 9 - label, 3], grey)
            (tmp_path / name / f"{number}.PNG").write_bytes(tf.io.encode_png(image).numpy())
        (tmp_path / name / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "readme.txt").write_text("not a class")
    return tmp_path


def test_images_are_labelled_by_their_subfolder(folder):
    source = ctl.data.image_folder(str(folder), size=(4, 5))
    batch = source.gather(tf.range(6, dtype=tf.int64))
    assert source.classes == ["cat", "dog", "eel"]
    assert batch["label"].numpy().tolist() == [0, 1, 1, 2, 2, 2]
    assert batch["image"].shape == (6, 4, 5, 3)
    grey = [0, 50, 60, 100, 110, 120]
    np.testing.assert_allclose(batch["image"][:, 0, 0, 0], grey, rtol=1e-6)


def test_images_may_be_uint8_which_preprocess_scales(folder):
    source = ctl.data.image_folder(str(folder), size=(4, 5), dtype="uint8")
    image = source.gather(tf.range(6, dtype=tf.int64))["image"]
    assert image.dtype == tf.uint8 and image.shape == (6, 4, 5, 3)
    assert image[:, 0, 0, 0].numpy().tolist() == [0, 50, 60, 100, 110, 120]
    with pytest.raises(ctl.UsageError, match="dtype='int8', but requires 'float32' or 'uint8'"):
        ctl.data.image_folder(str(folder), dtype="int8")


def test_classes_may_be_given_in_another_order(folder):
    source = ctl.data.image_folder(str(folder), size=(4, 5), classes=["eel", "cat"])
    labels = source.gather(tf.range(len(source), dtype=tf.int64))["label"]
    assert labels.numpy().tolist() == [0, 0, 0, 1]


def test_images_of_different_sizes_may_be_cropped_by_the_augmentation(folder):
    def crop(example, seed):
        image = tf.image.stateless_random_crop(example["image"], [5, 6, 3], seed)
        return {**example, "image": image}

    data = ctl.data.augmented(ctl.data.image_folder(str(folder)), crop)
    elements.check_data(data, "train")
    stream = batching.training_batches(data, Layout(6, 1), seed=0, start=0, prefetch=1)
    (element,) = stream.take(1)
    pairs = zip(element.batch["label"].numpy(), element.batch["image"].numpy(), strict=True)
    assert sorted((label, image[0, 0, 0]) for label, image in pairs) == [
        (0, 0), (1, 50), (1, 60), (2, 100), (2, 110), (2, 120),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["no folder", "no subfolders", "no images", "missing class"])
def test_wrong_folders_are_rejected_in_one_line(folder, kind):
    (folder / "empty" / "birds").mkdir(parents=True)
    name, classes, message = {
        "no folder": ("nowhere", None, "is not a folder"),
        "no subfolders": ("empty/birds", None, "has no subfolders"),
        "no images": ("empty", None, "has no images"),
        "missing class": ("", ["cat", "cow"], "has no subfolder 'cow'"),
    }[kind]
    with pytest.raises(ctl.UsageError) as error:
        ctl.data.image_folder(str(folder / name), classes=classes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
