"""IDX files: real MNIST, every type of the format, errors of one line; and folders of images."""

import gzip
import hashlib
import math
import pathlib
import re
import struct
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.data.files.images import read_idx
from tests.data.reading import lists, one_line, read_all

MNIST = pathlib.Path(__file__).resolve().parents[3] / "experiments" / "data" / "mnist"
# Type byte -> its name in struct and numpy, and three values.
TYPES = {
    0x08: ("B", [0, 1, 255]),
    0x09: ("b", [-128, -2, 127]),
    0x0B: ("h", [-(2**15), -2, 2**15 - 1]),
    0x0C: ("i", [-(2**31), -2, 2**31 - 1]),
    0x0D: ("f", [0.5, -(2.0**100), math.inf]),
    0x0E: ("d", [0.1, -(2.0**1000), math.inf]),
}


def encode(values, shape, kind=0x08):
    """The bytes of an IDX file."""
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape)
    return header + struct.pack(f">{len(values)}{TYPES[kind][0]}", *values)


IMAGES = encode(range(24), (4, 3, 2))
LABELS = encode([3, 1, 0, 2], (4,))


@pytest.fixture
def folder(tmp_path):
    """A complete tiny dataset: four images of 3 x 2."""
    write(tmp_path)
    return tmp_path


def write(folder, images=IMAGES, labels=LABELS):
    """Writes the training split."""
    (folder / "train-images-idx3-ubyte").write_bytes(images)
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)


@pytest.mark.parametrize(
    ("split", "count", "labels"), [("train", 60_000, [5, 0, 4, 1]), ("eval", 10_000, [7, 2, 1, 0])]
)
def test_reads_real_mnist(split, count, labels):
    source = ctl.data.idx(MNIST, split)
    assert len(source) == count
    first = source.gather(tf.range(4, dtype=tf.int64))
    assert first["image"].shape == [4, 28, 28]
    assert first["image"].dtype == tf.uint8
    assert first["label"].dtype == tf.int32
    assert first["label"].numpy().tolist() == labels


def test_mnist_files_have_the_checksums_of_the_readme():
    documented = dict(re.findall(r"([0-9a-f]{64})  (\S+)", (MNIST / "README.md").read_text()))
    digests = {
        file.stem: hashlib.sha256(gzip.decompress(file.read_bytes())).hexdigest()
        for file in MNIST.glob("*.gz")
    }
    assert digests == {name: digest for digest, name in documented.items()}
    assert len(digests) == 4


@pytest.mark.parametrize("kind", TYPES)
def test_reads_every_type_into_the_byte_order_of_this_machine(tmp_path, kind):
    letter, values = TYPES[kind]
    (tmp_path / "file").write_bytes(encode([*values, 3, 4, 5], (3, 2), kind))
    array = read_idx(tmp_path / "file")
    assert array.dtype == np.dtype(letter) and array.dtype.isnative
    assert array.tolist() == np.array([*values, 3, 4, 5], letter).reshape(3, 2).tolist()
    # Integer labels become int32.
    write(tmp_path, encode(range(24), (6, 4)), encode([*values, 3, 4, 5], (6,), kind))
    batch = read_all(ctl.data.idx(tmp_path, "train"))
    assert batch["image"].shape == (6, 4)
    assert batch["label"].dtype == (tf.int32 if letter in "Bbhi" else np.dtype(letter))
    assert batch["label"].numpy().tolist() == array.ravel().tolist()


@pytest.mark.parametrize(
    ("split", "name", "pack"),
    [
        ("eval", "t10k-{}-idx{}-ubyte.gz", gzip.compress),
        ("train", "train-{}-idx{}-ubyte.gz", bytes),
        ("train", "train-{}.idx{}-ubyte", bytes),  # as some programs unpack them
    ],
)
def test_finds_each_split_gzipped_or_not(tmp_path, split, name, pack):
    (tmp_path / name.format("images", 3)).write_bytes(pack(IMAGES))
    (tmp_path / name.format("labels", 1)).write_bytes(pack(LABELS))
    batch = lists(ctl.data.idx(str(tmp_path), split))
    expected = np.arange(24).reshape(4, 3, 2).tolist()
    assert batch == {"image": expected, "label": [3, 1, 0, 2]}


CORRUPT_CRC = bytearray(gzip.compress(IMAGES))
CORRUPT_CRC[-8] ^= 1
CORRUPT = {
    "shorter than its magic number": IMAGES[:3],
    "truncated in the header": IMAGES[:9],
    "truncated in the values": IMAGES[:-1],
    "one byte too many": IMAGES + b"\0",
    "wrong magic number": b"\1" + IMAGES[1:],
    "an undefined type": IMAGES[:2] + b"\x0a" + IMAGES[3:],
    "no axes": bytes([0, 0, 8, 0]) + b"\5",
    "more axes than numpy supports": encode([1], [1] * 100),
    "an axis of length 0 and huge ones": encode([], (0, 2**32 - 1, 2**32 - 1, 2**32 - 1)),
    "declares 2**127 values": encode([1, 2], (2**31, 2**32 - 1, 2**32 - 1, 2**32 - 1)),
    "truncated gzip": gzip.compress(IMAGES)[:-12],
    "gzip with a wrong checksum": bytes(CORRUPT_CRC),
    "gzip with trailing bytes": gzip.compress(IMAGES) + b"abc",
}


@pytest.mark.parametrize("images", CORRUPT.values(), ids=CORRUPT)
def test_corrupt_file_is_rejected_in_one_line_with_its_path(folder, images):
    write(folder, images=images)
    message = one_line(ctl.data.idx, folder, "train")
    assert str(folder / "train-images-idx3-ubyte") in message
    assert "download it again" in message


@pytest.mark.parametrize(
    ("shape", "memory", "content", "read"),
    [
        ((4, 3, 2), 2**40, bytes(2**26), 2**18),  # more than it declares
        ((2**10, 2**10, 2**6), 2**20, bytes(2**26), 2**18),  # more than memory
        ((2**20, 2**10, 2**10), 2**50, b"12", 2),
    ],
)
def test_gzipped_file_is_not_inflated_beyond_its_header_and_memory(
    tmp_path, monkeypatch, shape, memory, content, read
):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (memory, memory))
    with gzip.open(tmp_path / "bomb", "wb") as file:
        file.write(encode([], shape) + content)
    tracemalloc.start()
    try:
        assert f"bytes, but {read} could be read" in one_line(read_idx, tmp_path / "bomb")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_images_and_labels_that_do_not_match_are_rejected(folder):
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    write(folder, labels=encode([3, 1, 0], (3,)))
    message = one_line(ctl.data.idx, folder, "train")
    assert message.startswith(f"{images} has 4 examples and {labels} has 3: the two files do not")
    write(folder, labels=encode(range(8), (4, 2)))
    message = one_line(ctl.data.idx, folder, "train")
    assert f"{labels} has 2 axes, but a file of labels must have one" in message


def test_missing_file_is_rejected_with_what_to_do(folder):
    for part in ("labels", "images"):
        path = folder / f"train-{part}-idx{1 + 2 * (part == 'images')}-ubyte"
        path.unlink()
        path.mkdir()  # a folder is not a file
        message = one_line(ctl.data.idx, folder, "train")
        assert f"{folder} has no file train-{part}-idxN-ubyte" in message
        assert "set data.dir" in message


def test_unknown_split_folder_or_file_is_rejected(folder):
    message = one_line(ctl.data.idx, folder, "validation")
    assert "has no split 'validation': choose one of ['train', 'eval']" in message
    for path in (folder / "nowhere", folder / "train-images-idx3-ubyte", folder / ("x" * 300)):
        assert f"Folder {path} does not exist: set" in one_line(ctl.data.idx, path, "train")
    for path in (folder, folder / "nowhere"):
        assert one_line(read_idx, path).startswith(f"{path} cannot be read: ")


# Folders of images.


@pytest.fixture
def classes(tmp_path):
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


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_images_are_labelled_by_their_subfolder(classes, dtype):
    source = ctl.data.image_folder(str(classes), size=(4, 5), dtype=dtype)
    batch = read_all(source)
    assert source.classes == ["cat", "dog", "eel"]
    assert batch["label"].numpy().tolist() == [0, 1, 1, 2, 2, 2]
    assert batch["image"].shape == (6, 4, 5, 3)
    assert batch["image"].dtype == dtype
    grey = [0, 50, 60, 100, 110, 120]
    np.testing.assert_allclose(batch["image"][:, 0, 0, 0], grey, rtol=1e-6)


@pytest.mark.parametrize(
    ("encode", "layout", "sides"),
    [(tf.io.encode_png, ">II", (9, 6)), (tf.io.encode_jpeg, ">HH", (6, 9))],
)
def test_image_with_far_more_pixels_than_its_file_can_have_is_not_decoded(
    classes, encode, layout, sides
):
    content = bytearray(encode(tf.zeros([6, 9, 3], tf.uint8)).numpy())
    struct.pack_into(layout, content, content.index(struct.pack(layout, *sides)), 8192, 8193)
    path = classes / "eel" / "1.PNG"
    path.write_bytes(content)
    source = ctl.data.image_folder(str(classes), size=(4, 5), dtype="float32")
    message = one_line(ctl.data.cached, source, "memory")
    assert "1.PNG cannot be read (" in message and "it declares far more pixels" in message
    if layout == ">II":  # TensorFlow decodes such a JPEG file, in 200 MB
        path.write_bytes(content.ljust(700_000))  # a byte has fewer than 100 pixels
        assert "Invalid PNG" in one_line(ctl.data.cached, source, "memory")


def test_classes_may_be_given_in_another_order(classes):
    source = ctl.data.image_folder(str(classes), size=(4, 5), classes=["eel", "cat"])
    assert read_all(source)["label"].numpy().tolist() == [0, 0, 0, 1]


class Images(ctl.StandardTrainer):
    """Has a loss of the images in the folder `options.model["folder"]`."""

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Flatten(), tf_keras.layers.Dense(3)])

    def build_dataset(self, split, input_context):
        return ctl.data.image_folder(self.options.model["folder"], size=(4, 5))

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(outputs**2, axis=1)


@pytest.mark.slow
def test_image_that_cannot_be_decoded_is_named(classes):
    (classes / "eel" / "1.PNG").write_bytes(b"not an image")
    trainer = Images(
        global_batch_size=2,
        optimizer=lambda: tf_keras.optimizers.SGD(0.1),
        strategy=testing.make_strategy(2),
        options=ctl.TrainerOptions(model={"folder": str(classes)}),
    )
    for run, steps in ((trainer.train, 3), (ctl.StandardEvaluator(trainer).evaluate, -1)):
        with pytest.raises(ctl.UsageError, match=r"eel/1\.PNG cannot be read \(InvalidArgument"):
            run(tf.constant(steps))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nowhere", {}, "is not a folder"),
        ("empty/birds", {}, "has no subfolders"),
        ("empty", {}, "has no images"),
        ("", dict(classes=["cat", "cow"]), "has no subfolder 'cow'"),
        ("", dict(dtype="int8"), "dtype='int8', but requires 'float32' or 'uint8'"),
    ],
)
def test_wrong_folders_and_options_are_rejected_in_one_line(classes, name, options, message):
    (classes / "empty" / "birds").mkdir(parents=True)
    assert message in one_line(ctl.data.image_folder, str(classes / name), **options)
