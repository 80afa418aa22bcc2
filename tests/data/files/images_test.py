"""IDX files: real MNIST, every type of the format, errors of one line; and folders of images."""

import gzip
import hashlib
import math
import pathlib
import random
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
from ctl.data.kinds import kind_of
from ctl.data.layout import Layout
from tests.data.reading import check_data, one_line, read_all

MNIST = pathlib.Path(__file__).resolve().parents[3] / "experiments" / "data" / "mnist"
FIRST_LABELS = {
    "train": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4],
    "eval": [7, 2, 1, 0, 4, 1, 4, 9, 5, 9],
}
# Type byte -> its names in struct and numpy.
TYPES = {
    0x08: ("B", np.uint8),
    0x09: ("b", np.int8),
    0x0B: ("h", np.int16),
    0x0C: ("i", np.int32),
    0x0D: ("f", np.float32),
    0x0E: ("d", np.float64),
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
    write(tmp_path, IMAGES, LABELS)
    return tmp_path


def write(folder, images=None, labels=None, prefix="train", ending=""):
    """Writes one split."""
    if images is not None:
        (folder / f"{prefix}-images-idx3-ubyte{ending}").write_bytes(images)
    if labels is not None:
        (folder / f"{prefix}-labels-idx1-ubyte{ending}").write_bytes(labels)


@pytest.mark.parametrize(("split", "count"), [("train", 60_000), ("eval", 10_000)])
def test_reads_real_mnist(split, count):
    source = ctl.data.idx(MNIST, split)
    assert len(source) == count
    first = source.gather(tf.range(10, dtype=tf.int64))
    assert first["image"].shape == [10, 28, 28]
    assert first["image"].dtype == tf.uint8
    assert first["label"].dtype == tf.int32
    assert first["label"].numpy().tolist() == FIRST_LABELS[split]
    if split == "train":
        mean = read_idx(MNIST / "train-images-idx3-ubyte.gz").mean() / 255
        assert mean == pytest.approx(0.1307, abs=5e-5)  # as published


def test_mnist_files_have_the_checksums_of_the_readme():
    documented = dict(re.findall(r"([0-9a-f]{64})  (\S+)", (MNIST / "README.md").read_text()))
    digests = {
        file.stem: hashlib.sha256(gzip.decompress(file.read_bytes())).hexdigest()
        for file in MNIST.glob("*.gz")
    }
    assert digests == {name: digest for digest, name in documented.items()}
    assert len(digests) == 4


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("kind", TYPES)
def test_reads_every_type_into_the_byte_order_of_this_machine(tmp_path, kind, zipped):
    letter, dtype = TYPES[kind]
    bits = 8 * struct.calcsize(letter)
    extremes = {
        "B": [0, 1, 2**bits - 1],
        "f": [0.5, -(2.0**100), math.inf],
        "d": [0.1, -(2.0**1000), math.inf],
    }.get(letter, [-(2 ** (bits - 1)), -2, 2 ** (bits - 1) - 1])
    content = encode([*extremes, 3, 4, 5], (3, 2), kind)
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(content) if zipped else content)
    array = read_idx(path)
    assert array.dtype == dtype
    assert array.dtype.isnative
    assert array.tolist() == np.array([*extremes, 3, 4, 5], dtype).reshape(3, 2).tolist()
    assert tf.convert_to_tensor(array).dtype == tf.as_dtype(dtype)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("prefix", ["train", "t10k"])
def test_finds_each_split_gzipped_or_not(tmp_path, prefix, ending):
    pack = gzip.compress if ending else bytes
    write(tmp_path, pack(IMAGES), pack(LABELS), prefix, ending)
    batch = read_all(ctl.data.idx(str(tmp_path), "train" if prefix == "train" else "eval"))
    assert batch["image"].numpy().tolist() == np.arange(24).reshape(4, 3, 2).tolist()
    assert batch["label"].numpy().tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),  # the content is not gzipped
        ("train-images.idx3-ubyte", "train-labels.idx1-ubyte"),  # as some programs unpack them
    ],
)
def test_finds_other_names_of_files(tmp_path, images, labels):
    (tmp_path / images).write_bytes(IMAGES)
    (tmp_path / labels).write_bytes(LABELS)
    assert len(ctl.data.idx(tmp_path, "train")) == 4


@pytest.mark.parametrize("shape", [(4,), (4, 6), (4, 1, 2, 3)])
def test_examples_may_have_any_number_of_axes(tmp_path, shape):
    write(tmp_path, encode(range(math.prod(shape)), shape), LABELS)
    assert read_all(ctl.data.idx(tmp_path, "train"))["image"].shape == shape


def test_integer_labels_become_int32_and_others_keep_their_values(folder):
    for kind in (0x08, 0x09, 0x0B, 0x0C):
        write(folder, labels=encode([3, 1, 0, 2], (4,), kind))
        labels = read_all(ctl.data.idx(folder, "train"))["label"]
        assert labels.dtype == tf.int32
        assert labels.numpy().tolist() == [3, 1, 0, 2]
    write(folder, labels=encode([0.25, -1.5, 0, 2], (4,), 0x0E))
    labels = read_all(ctl.data.idx(folder, "train"))["label"]
    assert labels.numpy().tolist() == [0.25, -1.5, 0, 2]


CORRUPT_CRC = bytearray(gzip.compress(IMAGES))
CORRUPT_CRC[-8] ^= 1
CORRUPT = {
    "empty": b"",
    "shorter than its magic number": IMAGES[:3],
    "truncated in the header": IMAGES[:9],
    "truncated in the values": IMAGES[:-1],
    "no values": IMAGES[:16],
    "one byte too many": IMAGES + b"\0",
    "wrong magic number": b"\1" + IMAGES[1:],
    "an undefined type": IMAGES[:2] + b"\x0a" + IMAGES[3:],
    "text": b"404 Not Found\n",
    "no axes": bytes([0, 0, 8, 0]) + b"\5",
    "more axes than numpy supports": encode([1], [1] * 100),
    "an axis of length 0": encode([], (0, 28, 28)),
    "an example without values": encode([], (4, 0, 28)),
    "an axis of length 0 and huge ones": encode([], (0, 2**32 - 1, 2**32 - 1, 2**32 - 1)),
    "declares 2**40 values": encode([1, 2], (2**20, 2**10, 2**10)),
    "declares 2**127 values": encode([1, 2], (2**31, 2**32 - 1, 2**32 - 1, 2**32 - 1)),
    "truncated gzip": gzip.compress(IMAGES)[:-12],
    "only the magic number of gzip": b"\x1f\x8b",
    "gzip with a wrong checksum": bytes(CORRUPT_CRC),
    "gzip with trailing bytes": gzip.compress(IMAGES) + b"abc",
    "gzip of nothing": gzip.compress(b""),
    "gzip of a truncated file": gzip.compress(IMAGES[:-1]),
}


@pytest.mark.parametrize("images", CORRUPT.values(), ids=CORRUPT)
def test_corrupt_file_is_rejected_in_one_line_with_its_path(folder, images):
    write(folder, images=images)
    message = one_line(ctl.data.idx, folder, "train")
    assert str(folder / "train-images-idx3-ubyte") in message
    assert "download it again" in message


def test_header_that_declares_2_to_the_40_values_allocates_nothing(folder):
    write(folder, images=CORRUPT["declares 2**40 values"])
    tracemalloc.start()
    try:
        assert "1099511627776 bytes, but 2 follow" in one_line(ctl.data.idx, folder, "train")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_images_and_labels_that_do_not_match_are_rejected(folder):
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    write(folder, labels=encode([3, 1, 0], (3,)))
    assert one_line(ctl.data.idx, folder, "train") == (
        f"{images} has 4 examples and {labels} has 3: the two files do not belong to the same "
        "dataset, download them again."
    )
    write(folder, labels=encode(range(8), (4, 2)))
    message = one_line(ctl.data.idx, folder, "train")
    assert f"{labels} has 2 axes, but a file of labels must have one" in message


def test_missing_file_is_rejected_with_what_to_do(folder):
    for part in ("labels", "images"):
        next(folder.glob(f"train-{part}*")).unlink()
        message = one_line(ctl.data.idx, folder, "train")
        assert f"{folder} has no file train-{part}-idxN-ubyte" in message
        assert "set data.dir" in message
    (folder / "train-images-idx3-ubyte").mkdir()  # a folder is not a file
    assert "has no file train-images-idxN-ubyte" in one_line(ctl.data.idx, folder, "train")
    assert "has no file t10k-images-idxN-ubyte" in one_line(ctl.data.idx, folder, "eval")


@pytest.mark.parametrize("name", ["nowhere", "file", "x" * 300])
def test_missing_folder_is_rejected(tmp_path, name):
    (tmp_path / "file").write_bytes(IMAGES)
    message = one_line(ctl.data.idx, tmp_path / name, "train")
    assert message == (
        f"Folder {tmp_path / name} does not exist: set data.dir to a folder of IDX files."
    )


def test_error_for_an_unknown_split_lists_the_choices(folder):
    message = one_line(ctl.data.idx, folder, "validation")
    assert "has no split 'validation': choose one of ['train', 'eval']" in message


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_error_for_an_unreadable_file_has_its_path(tmp_path, name):
    message = one_line(read_idx, tmp_path / name)
    assert message.startswith(f"{tmp_path / name} cannot be read: ")


def test_any_damage_is_rejected_in_one_line_or_leaves_a_readable_dataset(folder):
    draw, rejected = random.Random(0), 0
    for _ in range(300):
        pack = draw.choice([bytes, gzip.compress])
        pair = [pack(IMAGES), pack(LABELS)]
        damaged = draw.randrange(2)
        content = pair[damaged]
        start = draw.randrange(len(content))
        end = draw.choice([start, start + 1, start + draw.randrange(1, 9), len(content)])
        pair[damaged] = content[:start] + draw.randbytes(draw.randrange(3)) + content[end:]
        write(folder, *pair)
        try:
            batch = read_all(ctl.data.idx(folder, "train"))
        except ctl.UsageError as error:
            rejected += 1
            assert "\n" not in str(error)
            assert str(folder) in str(error)
        else:
            assert len(batch["image"]) == len(batch["label"]) >= 1
    assert 100 < rejected < 280


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


def test_images_are_labelled_by_their_subfolder(classes):
    source = ctl.data.image_folder(str(classes), size=(4, 5), dtype="float32")
    batch = source.gather(tf.range(6, dtype=tf.int64))
    assert source.classes == ["cat", "dog", "eel"]
    assert batch["label"].numpy().tolist() == [0, 1, 1, 2, 2, 2]
    assert batch["image"].shape == (6, 4, 5, 3)
    grey = [0, 50, 60, 100, 110, 120]
    np.testing.assert_allclose(batch["image"][:, 0, 0, 0], grey, rtol=1e-6)


def test_images_are_uint8_which_preprocess_scales(classes):
    source = ctl.data.image_folder(str(classes), size=(4, 5))
    image = source.gather(tf.range(6, dtype=tf.int64))["image"]
    assert image.dtype == tf.uint8 and image.shape == (6, 4, 5, 3)
    assert image[:, 0, 0, 0].numpy().tolist() == [0, 50, 60, 100, 110, 120]
    with pytest.raises(ctl.UsageError, match="dtype='int8', but requires 'float32' or 'uint8'"):
        ctl.data.image_folder(str(classes), dtype="int8")


def test_classes_may_be_given_in_another_order(classes):
    source = ctl.data.image_folder(str(classes), size=(4, 5), classes=["eel", "cat"])
    labels = source.gather(tf.range(len(source), dtype=tf.int64))["label"]
    assert labels.numpy().tolist() == [0, 0, 0, 1]


def test_images_of_different_sizes_may_be_cropped_by_the_augmentation(classes):
    def crop(example, seed):
        image = tf.image.stateless_random_crop(example["image"], [5, 6, 3], seed)
        return {**example, "image": image}

    data = ctl.data.augmented(ctl.data.image_folder(str(classes)), crop)
    check_data(data, "train")
    stream = kind_of(data).training(Layout(6, 1), seed=0, start=0, prefetch=1)
    (element,) = stream.take(1)
    pairs = zip(element.batch["label"].numpy(), element.batch["image"].numpy(), strict=True)
    assert sorted((label, image[0, 0, 0]) for label, image in pairs) == [
        (0, 0), (1, 50), (1, 60), (2, 100), (2, 110), (2, 120),
    ]  # fmt: skip


class Images(ctl.StandardTrainer):
    """Has a loss of the images in the folder `options.model["folder"]`."""

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Flatten(), tf_keras.layers.Dense(3)])

    def build_dataset(self, split, input_context):
        return ctl.data.image_folder(self.options.model["folder"], size=(4, 5))

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(outputs**2, axis=1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_image_that_cannot_be_decoded_is_named(classes, replicas):
    (classes / "eel" / "1.PNG").write_bytes(b"not an image")
    trainer = Images(
        global_batch_size=2,
        optimizer=lambda: tf_keras.optimizers.SGD(0.1),
        strategy=testing.make_strategy(replicas),
        options=ctl.TrainerOptions(model={"folder": str(classes)}),
    )
    line = r"eel/1\.PNG cannot be read \(InvalidArgumentError: "
    with pytest.raises(ctl.UsageError, match=line):
        trainer.train(tf.constant(3))  # one epoch
    with pytest.raises(ctl.UsageError, match=line):
        ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    if replicas == 1:
        with pytest.raises(ctl.UsageError, match=line):
            ctl.data.cached(trainer.build_dataset("train", None), "memory")


@pytest.mark.parametrize(
    ("name", "names", "message"),
    [
        ("nowhere", None, "is not a folder"),
        ("empty/birds", None, "has no subfolders"),
        ("empty", None, "has no images"),
        ("", ["cat", "cow"], "has no subfolder 'cow'"),
    ],
)
def test_wrong_folders_are_rejected_in_one_line(classes, name, names, message):
    (classes / "empty" / "birds").mkdir(parents=True)
    assert message in one_line(ctl.data.image_folder, str(classes / name), classes=names)
