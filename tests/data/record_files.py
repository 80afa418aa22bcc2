"""Writes small TFRecord files, for the tests of this folder."""

import pathlib

import tensorflow as tf

FEATURES = {
    "id": tf.io.FixedLenFeature([], tf.int64),
    "x": tf.io.FixedLenFeature([2], tf.float32),
}


def serialize(number):
    """An example with this id, whose serialized length depends on the id."""
    features = {
        "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "x": tf.train.Feature(
            float_list=tf.train.FloatList(value=[2 * number + 0.5, 2 * number + 1.5])
        ),
        "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"?" * (number % 7)])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write(path, numbers, options=None):
    """Writes examples with these ids to a file, and returns its path."""
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for number in numbers:
            writer.write(serialize(number))
    return str(path)


def write_files(folder, files, per_file):
    """Writes consecutive ids to several files, and returns the pattern of their paths."""
    for file in range(files):
        first = file * per_file
        write(folder / f"train-{file:02}.tfrecord", range(first, first + per_file))
    return str(folder / "train-*.tfrecord")


def flip_bit(path, offset):
    """Changes one bit of a file."""
    content = bytearray(pathlib.Path(path).read_bytes())
    content[offset] ^= 4
    pathlib.Path(path).write_bytes(content)
