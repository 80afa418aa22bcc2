"""A Transformer that predicts the next byte of a text, and the blocks of bytes that it learns from.

The setting is that of nanoGPT (Karpathy 2022, config/train_shakespeare_char.py and its CPU variant),
with bytes in place of the characters that occur, and biases. The matrix that embeds a byte also computes
its logit (Press and Wolf 2017).
"""

import pathlib
import sysconfig

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

_BYTES = 256
_SAMPLE = 300  # bytes of a sample
_LAYERS = tf_keras.layers


def _normal():
    return tf_keras.initializers.RandomNormal(stddev=0.02)  # two layers with one would be equal


class Block(_LAYERS.Layer):
    """Attention to the earlier bytes, and two dense layers, each behind a normalization."""

    def __init__(self, width, heads):
        super().__init__()
        self.norms = [_LAYERS.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self.attention = _LAYERS.MultiHeadAttention(
            heads, width // heads, kernel_initializer=_normal()
        )
        self.wide = _LAYERS.Dense(4 * width, activation="gelu", kernel_initializer=_normal())
        self.narrow = _LAYERS.Dense(width, kernel_initializer=_normal())

    def call(self, x):
        y = self.norms[0](x)
        x += self.attention(y, y, use_causal_mask=True)
        return x + self.narrow(self.wide(self.norms[1](x)))


class Transformer(tf_keras.Model):
    """[rows, context] bytes -> [rows, context, 256] logits of the bytes after them."""

    def __init__(self, *, layers, heads, width, context, recompute):
        super().__init__()
        self.bytes = _LAYERS.Embedding(_BYTES, width, embeddings_initializer=_normal())
        self.positions = _LAYERS.Embedding(context, width, embeddings_initializer=_normal())
        self.blocks = [Block(width, heads) for _ in range(layers)]
        if recompute == "blocks":
            self.blocks = [ctl.recompute(block) for block in self.blocks]
        self.norm = _LAYERS.LayerNormalization(epsilon=1e-5)

    def call(self, x):
        x = self.bytes(x) + self.positions(tf.range(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return tf.matmul(x, tf.cast(self.bytes.embeddings, x.dtype), transpose_b=True)


class CharLmTrainer(ctl.StandardTrainer):
    """Trains on the first 90 % of the bytes; the loss is the mean over bytes."""

    def build_model(self):
        return Transformer(**self.options.model)

    def build_dataset(self, split, input_context):
        text = read_text(self.options.data.dir)
        first = len(text) * 9 // 10
        return split_text(
            text[:first] if split == "train" else text[first:], self.options.model.context
        )

    def per_example_loss(self, batch, outputs):  # [rows, context], weighted by batch["weight"]
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_actions(self):
        return [Sample()]


class Sample(ctl.Action):
    """Writes a text that the model makes up to the summaries, at each evaluation."""

    def __init__(self):
        self.predict = None

    def __call__(self, outputs):
        trainer = self.controller.trainer
        if self.predict is None:
            self.predict = tf.function(lambda x: tf.nn.softmax(trainer.model(x)[0]))
        random = np.random.default_rng([trainer.options.seed, self.controller.step])
        context, text = trainer.options.model.context, list(b"\n")
        for _ in range(_SAMPLE):
            known = text[-context:]
            padded = np.array([known + [0] * (context - len(known))])  # no byte sees later ones
            weights = self.predict(padded).numpy()[len(known) - 1].astype(np.float64)
            text.append(random.choice(_BYTES, p=weights / weights.sum()))
        tf.summary.text("sample", bytes(text[1:]).decode(errors="replace"))


def read_text(folder):
    """Reads the files of a folder one after the other; "" for Python's standard library."""
    pattern = "*" if folder else "*.py"
    paths = pathlib.Path(folder or sysconfig.get_path("stdlib")).glob(pattern)
    content = b"".join(path.read_bytes() for path in sorted(paths) if path.is_file())
    if len(content) < 20:
        raise ctl.UsageError(f"data.dir is {folder!r}, but must be a folder of text files.")
    return np.frombuffer(content, np.uint8)


def split_text(text, length):
    """Splits a text into blocks; the last one is padded with bytes of weight 0."""
    count = -(-(len(text) - 1) // length)
    padded, weight = np.zeros(count * length + 1, np.uint8), np.zeros(count * length, np.float32)
    padded[: len(text)], weight[: len(text) - 1] = text, 1
    examples = {"x": padded[:-1], "label": padded[1:], "weight": weight}
    return ctl.data.arrays({k: v.reshape(count, length) for k, v in examples.items()})
