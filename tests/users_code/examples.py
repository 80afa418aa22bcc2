"""The examples of the cases, and the base class of their trainers.

A case is a trainer as its author writes it: small networks of TensorFlow's and Keras' tutorials, in
which everything but the subject of the case is as simple as possible.
"""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

DRAW = np.random.default_rng(13)
ROWS, CLASSES, WORDS, TOKENS = 19, 3, 11, 5

EXAMPLES = {
    "x": DRAW.normal(size=(ROWS, 6)),
    "view": DRAW.normal(size=(ROWS, 6)),  # a second view of the example, for contrastive losses
    "image": DRAW.uniform(size=(ROWS, 6, 6, 3)),
    "series": DRAW.normal(size=(ROWS, TOKENS, 4)),
    "tokens": DRAW.integers(1, WORDS, size=(ROWS, TOKENS)).astype(np.int32),
    "target": DRAW.integers(1, WORDS, size=(ROWS, TOKENS)).astype(np.int32),
    "segmentation": DRAW.integers(0, 2, size=(ROWS, 6, 6, 1)).astype(np.float64),
    "amount": DRAW.normal(size=ROWS),
    "label": (np.arange(ROWS) % CLASSES).astype(np.int32),
    "length": (1 + np.arange(ROWS) * 3 % TOKENS).astype(np.int32),
}
# Pairs of the first `length` tokens of a row.
EXAMPLES["pairs"] = DRAW.integers(0, 60, size=(ROWS, TOKENS, 2)) % EXAMPLES["length"][:, None, None]


class Case(ctl.StandardTrainer):
    """A classifier of three classes by one feature; a case overrides what it is about."""

    features = ("x", "label")

    def build_dataset(self, split, input_context):
        examples = {name: EXAMPLES[name] for name in self.features}
        if split == "eval":
            return ctl.data.arrays(examples)
        dataset = tf.data.Dataset.from_tensor_slices(examples)
        # Ragged batches have 8, 8 and 3 rows, as the tutorials make them.
        ragged = self.options.data.get("ragged")
        return ctl.data.GlobalBatches(dataset.batch(8)) if ragged else dataset

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(CLASSES)])

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )


def dense(*layers):
    """A network of layers between two dense ones."""
    first = tf_keras.layers.Dense(5, activation="tanh")
    return tf_keras.Sequential([first, *layers, tf_keras.layers.Dense(CLASSES)])


def convolutional(*layers):
    """A network of layers between a convolution and a dense layer."""
    first = tf_keras.layers.Conv2D(2, 3, activation="relu", padding="same")
    last = [tf_keras.layers.GlobalAveragePooling2D(), tf_keras.layers.Dense(CLASSES)]
    return tf_keras.Sequential([first, *layers, *last])
