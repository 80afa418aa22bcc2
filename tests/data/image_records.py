"""JPEG images of different sizes in a TFRecord file, for tests."""

import numpy as np
import tensorflow as tf

COUNT = 23
IMAGE = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def write_images(path):
    """Writes the images to a file, and returns its path."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in range(COUNT):
            pixels = np.random.default_rng(i).integers(0, 256, [9 + i % 4, 8 + i % 3, 3])
            example = tf.train.Example()
            encoded = tf.io.encode_jpeg(pixels.astype(np.uint8)).numpy()
            example.features.feature["image"].bytes_list.value.append(encoded)
            example.features.feature["label"].int64_list.value.append(i)
            writer.write(example.SerializeToString())
    return str(path)


def parse_image(record):
    """An image with a label, a name, and values of other types, of which one is ragged."""
    example = tf.io.parse_single_example(record, IMAGE)
    return {
        **example,
        "image": tf.io.decode_jpeg(example["image"], channels=3),
        "name": tf.strings.as_string(example["label"]) + "\0",
        "wide": tf.cast(tf.range(example["label"] % 5), tf.bfloat16),
        "flags": tf.stack([example["label"] > 3, True]),
    }
