"""Generated data files are read as exactly what they hold, or rejected."""

import gzip
import io
import itertools
import struct
import zlib

from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data.files.record_reader import DamagedRecord
from tests.support.generated import damaged, explore, folder, rejects

pytestmark = pytest.mark.slow
IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def encode_idx(array, kind=8):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return header + array.astype(IDX_TYPES[kind]).tobytes()


def decode_idx(raw):
    """The array in an IDX file, read according to the format; None if the file is not valid."""
    try:
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.GzipFile(fileobj=io.BytesIO(raw)).read()
        zeros, kind, axes = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{axes}I", raw, 4)
        values = np.frombuffer(raw[4 + 4 * axes :], IDX_TYPES[kind])
        return values.reshape(shape) if values.size and not zeros and 1 <= axes <= 32 else None
    except (OSError, EOFError, zlib.error, struct.error, KeyError, ValueError):
        return None


def decode_pair(pair):
    """The images and the labels, or None if they are not valid or do not match."""
    images, labels = (decode_idx(raw) for raw in pair.values())
    if images is None or labels is None or labels.ndim != 1 or len(images) != len(labels):
        return None
    return images, labels


@st.composite
def idx_pairs(draw):
    """File name -> content of images and labels, one of them changed, both zipped or neither."""
    count, side = draw(st.integers(1, 9)), st.integers(1, 4)
    rows, columns = draw(side), draw(side)
    pixels = np.arange(count * rows * columns).reshape(count, rows, columns) % 100
    kind = draw(st.sampled_from(list(IDX_TYPES)))
    pair = {
        "images-idx3-ubyte": encode_idx(pixels, kind),
        "labels-idx1-ubyte": encode_idx(np.arange(count) % 2),
    }
    name = draw(st.sampled_from(list(pair)))
    raw, zipped = pair[name], draw(st.booleans())
    changes = ["size", "type", "cut", "empty", "none", *["damage", "zip"] * 2]
    change = draw(st.sampled_from(changes))
    if change == "size":
        position = 4 + 4 * draw(st.integers(0, raw[3] - 1))
        size = draw(st.sampled_from([0, 1, 2, count + 1, count - 1, 2**31, 2**32 - 1]))
        raw = raw[:position] + struct.pack(">I", size) + raw[position + 4 :]
    elif change == "type":  # or the number of axes
        kind, axes = draw(st.sampled_from([8, 9, 10, 13, 14, 0])), draw(st.integers(0, 255))
        raw = raw[:2] + bytes([kind, axes]) + raw[4:]
    elif change == "cut":
        odd = [b"", raw[:4], raw[:16], raw + b"\0", raw * 2, b"404", raw[:-1], raw[::-1]]
        raw = draw(st.sampled_from(odd))
    elif change == "empty":
        raw = encode_idx(np.zeros((0, rows, columns) if "images" in name else (0,)))
    elif change == "damage":
        raw = draw(damaged(raw))
    pair[name] = raw
    if zipped:
        pair = {key: gzip.compress(content, mtime=0) for key, content in pair.items()}
        if change == "zip":
            raw = pair[name]
            twice_or_padded = st.sampled_from([raw[:-4], raw * 2, raw + b"\0" * 5])
            pair[name] = draw(st.one_of(damaged(raw), twice_or_padded))
    ending = draw(st.sampled_from(["", ".gz"]))
    return {f"{key}{ending}": content for key, content in pair.items()}


def accepts_idx(pair):
    with folder({f"data/train-{name}": raw for name, raw in pair.items()}):
        rejected, source = rejects(lambda: ctl.data.idx("data", "train"), "data/train-")
        expected = decode_pair(pair)
        assert rejected == (expected is None)
        if rejected:
            return False
        batch = source.gather(tf.range(len(source), dtype=tf.int64))
    for name, values in zip(("image", "label"), expected, strict=True):
        np.testing.assert_array_equal(batch[name].numpy(), values)
    return True


def test_idx_files_are_read_as_they_are_or_rejected():
    explore(idx_pairs(), accepts_idx, count=0.3)


def example(number):
    features = {
        "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number, -number])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def encode_records(records):
    """A TFRecord file: for each record its length, a CRC of that, the record and a CRC of that."""
    frames = []
    for record in records:
        length = struct.pack("<Q", len(record))
        frames.append(length + masked_crc(length) + record + masked_crc(record))
    return b"".join(frames)


def masked_crc(raw):
    """CRC-32C, masked as in TFRecord files (tensorflow/core/lib/hash/crc32c.h)."""
    crc = 0xFFFFFFFF
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def decode_records(raw):
    """The ids in a TFRecord file, read according to the format; None if it is damaged or empty."""
    ids = []
    while raw:
        size = int.from_bytes(raw[:8], "little")
        record = raw[12 : 12 + size]
        if raw[: 16 + size] != encode_records([record]):
            return None
        ids.append(tf.train.Example.FromString(record).features.feature["id"].int64_list.value[0])
        raw = raw[16 + size :]
    return ids or None


FEATURES = {
    "id": tf.io.FixedLenFeature([], tf.int64),
    "x": tf.io.FixedLenFeature([2], tf.float32),
}
WRONG_FEATURES = [
    {"x": tf.io.FixedLenFeature([3], tf.float32)},
    {"id": tf.io.FixedLenFeature([], tf.string)},
    {"y": tf.io.FixedLenFeature([], tf.int64)},
]
ODD_PATTERNS = ["data/no*", "no/*", "", "data", "data/", "\0", "x" * 300, "[", "é*", "data/["]


@st.composite
def record_files(draw):
    """(files, what was changed, the pattern, the features)"""
    records = {n: [example(10 * n + i) for i in range(4)] for n in range(2)}
    files = {f"data/{n}.tfrecord": encode_records(each) for n, each in records.items()}
    number = draw(st.integers(0, 1))
    name = f"data/{number}.tfrecord"
    raw, pattern, features = files[name], "data/*.tfrecord", FEATURES
    change = draw(st.sampled_from(["features", "bytes", "pattern", "fewer", *["damage"] * 6]))
    if change == "features":
        features = {**FEATURES, **draw(st.sampled_from(WRONG_FEATURES))}
    elif change == "bytes":
        files[name] = draw(st.sampled_from([b"", raw[:16], b"text", raw[:-1], raw * 2]))
    elif change == "pattern":
        pattern = draw(st.sampled_from(ODD_PATTERNS))
    elif change == "fewer":
        files[name] = encode_records(records[number][: draw(st.integers(0, 4))])
    else:
        files[name] = draw(damaged(raw))
    return files, change, pattern, features


def accepts_records(case):
    files, change, pattern, features = case
    ids = [decode_records(raw) for raw in files.values()]
    valid = change != "features" and None not in ids
    expected = sorted(itertools.chain(*ids)) if valid else None
    with folder(files):
        rejected, source = rejects(lambda: ctl.data.records(pattern, features), "record", "data")
        if rejected:
            assert expected is None or change == "pattern"
            return False
        assert change != "pattern"
        try:
            examples = source.gather(tf.range(len(source), dtype=tf.int64))
        except (DamagedRecord, tf.errors.InvalidArgumentError):
            assert expected is None
            return False
    ids = examples["id"].numpy()
    assert sorted(ids) == expected
    np.testing.assert_array_equal(examples["x"], np.stack([ids, -ids], axis=1))
    return True


def test_tfrecord_files_are_read_as_they_are_or_rejected():
    explore(record_files(), accepts_records, count=0.25)
