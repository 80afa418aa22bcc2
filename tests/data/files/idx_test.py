"""IDX files: real MNIST, every type of the format, and one-line errors for corrupt files."""

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

import ctl
from ctl.data.files.images import read_idx

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


def read_all(source):
    """All examples of a source, in order."""
    batch = source.gather(tf.range(len(source), dtype=tf.int64))
    return {name: value.numpy() for name, value in batch.items()}


def error_of(*arguments, function=ctl.data.idx):
    """The one-line message of the UsageError that reading raises."""
    with pytest.raises(ctl.UsageError) as error:
        function(*arguments)
    message = str(error.value)
    assert "\n" not in message
    assert error.value.__suppress_context__ or error.value.__context__ is None
    return message


@pytest.mark.parametrize(("split", "count"), [("train", 60_000), ("eval", 10_000)])
def test_reads_real_mnist(split, count):
    source = ctl.data.idx(MNIST, split)
    assert len(source) == count
    first = source.gather(tf.range(10, dtype=tf.int64))
    assert first["image"].shape == [10, 28, 28]
    assert first["image"].dtype == tf.uint8
    assert first["label"].dtype == tf.int32
    assert first["label"].numpy().tolist() == FIRST_LABELS[split]


def test_pixels_of_real_mnist_have_the_published_mean():
    assert read_idx(MNIST / "train-images-idx3-ubyte.gz").mean() / 255 == pytest.approx(
        0.1307, abs=5e-5
    )


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
    assert batch["image"].tolist() == np.arange(24).reshape(4, 3, 2).tolist()
    assert batch["label"].tolist() == [3, 1, 0, 2]


def test_gzip_is_detected_by_the_content_not_the_name(tmp_path):
    write(tmp_path, IMAGES, LABELS, ending=".gz")
    assert len(ctl.data.idx(tmp_path, "train")) == 4


def test_finds_the_file_names_that_some_programs_unpack(tmp_path):
    (tmp_path / "train-images.idx3-ubyte").write_bytes(IMAGES)
    (tmp_path / "train-labels.idx1-ubyte").write_bytes(LABELS)
    assert len(ctl.data.idx(tmp_path, "train")) == 4


@pytest.mark.parametrize("shape", [(4,), (4, 6), (4, 1, 2, 3)])
def test_examples_may_have_any_number_of_axes(tmp_path, shape):
    write(tmp_path, encode(range(math.prod(shape)), shape), LABELS)
    assert read_all(ctl.data.idx(tmp_path, "train"))["image"].shape == shape


@pytest.mark.parametrize("kind", [0x08, 0x09, 0x0B, 0x0C])
def test_integer_labels_become_int32(folder, kind):
    write(folder, labels=encode([3, 1, 0, 2], (4,), kind))
    labels = read_all(ctl.data.idx(folder, "train"))["label"]
    assert labels.dtype == np.int32
    assert labels.tolist() == [3, 1, 0, 2]


def test_floating_point_labels_keep_their_values(folder):
    write(folder, labels=encode([0.25, -1.5, 0, 2], (4,), 0x0E))
    assert read_all(ctl.data.idx(folder, "train"))["label"].tolist() == [0.25, -1.5, 0, 2]


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
    message = error_of(folder, "train")
    assert str(folder / "train-images-idx3-ubyte") in message
    assert "download it again" in message


def test_header_that_declares_2_to_the_40_values_allocates_nothing(folder):
    write(folder, images=CORRUPT["declares 2**40 values"])
    tracemalloc.start()
    try:
        assert "1099511627776 bytes, but 2 follow" in error_of(folder, "train")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_images_and_labels_of_different_counts_are_rejected(folder):
    write(folder, labels=encode([3, 1, 0], (3,)))
    message = error_of(folder, "train")
    assert f"{folder / 'train-images-idx3-ubyte'} has 4 examples" in message
    assert f"{folder / 'train-labels-idx1-ubyte'} has 3" in message
    assert "download them again" in message


def test_labels_with_two_axes_are_rejected(folder):
    write(folder, labels=encode(range(8), (4, 2)))
    message = error_of(folder, "train")
    assert (
        f"{folder / 'train-labels-idx1-ubyte'} has 2 axes, but a file of labels must have one"
        in message
    )


@pytest.mark.parametrize("part", ["images", "labels"])
def test_error_for_a_missing_file_says_what_to_do(folder, part):
    next(folder.glob(f"train-{part}*")).unlink()
    message = error_of(folder, "train")
    assert f"{folder} has no file train-{part}-idxN-ubyte" in message
    assert "set data.dir" in message


def test_missing_split_is_rejected(folder):
    assert "has no file t10k-images-idxN-ubyte" in error_of(folder, "eval")


def test_folder_with_the_name_of_a_file_is_not_read(folder):
    (folder / "train-images-idx3-ubyte").unlink()
    (folder / "train-images-idx3-ubyte").mkdir()
    assert "has no file train-images-idxN-ubyte" in error_of(folder, "train")


@pytest.mark.parametrize("name", ["nowhere", "file", "x" * 300])
def test_missing_folder_is_rejected(tmp_path, name):
    (tmp_path / "file").write_bytes(IMAGES)
    message = error_of(tmp_path / name, "train")
    assert message == (
        f"Folder {tmp_path / name} does not exist: set data.dir to a folder of IDX files."
    )


def test_error_for_an_unknown_split_lists_the_choices(folder):
    message = error_of(folder, "validation")
    assert "'validation'" in message
    assert "train" in message
    assert "eval" in message


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_error_for_an_unreadable_file_has_its_path(tmp_path, name):
    message = error_of(tmp_path / name, function=read_idx)
    assert message.startswith(f"{tmp_path / name} cannot be read: ")


def test_any_damage_is_rejected_in_one_line_or_leaves_a_readable_dataset(folder):
    draw = random.Random(0)
    outcomes = {"read": 0, "rejected": 0}
    for _ in range(300):
        pack = draw.choice([bytes, gzip.compress])
        pair = [bytearray(pack(IMAGES)), bytearray(pack(LABELS))]
        damage(draw, draw.choice(pair))
        write(folder, *pair)
        try:
            batch = read_all(ctl.data.idx(folder, "train"))
        except ctl.UsageError as error:
            assert "\n" not in str(error)
            assert str(folder) in str(error)
            outcomes["rejected"] += 1
        else:
            assert len(batch["image"]) == len(batch["label"]) >= 1
            outcomes["read"] += 1
    assert outcomes["rejected"] > 100
    assert outcomes["read"] > 20


def damage(draw, content):
    """Changes, truncates, inserts or deletes bytes of a file."""
    where = draw.randrange(len(content))
    kind = draw.randrange(5)
    if kind == 0:
        content[where] ^= 1 << draw.randrange(8)
    elif kind == 1:
        content[where] = draw.randrange(256)
    elif kind == 2:
        del content[where:]
    elif kind == 3:
        content[where:where] = draw.randbytes(draw.randrange(1, 9))
    else:
        del content[where : where + draw.randrange(1, 9)]
