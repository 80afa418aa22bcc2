"""Contrastive learning of 28 x 28 images without labels (SimCLR, Chen et al. 2020, arXiv:2002.05709).

Two random views of an image are a pair; all other views of the global batch are its negatives, so the
loss compares rows of different replicas. The labels are used only to measure the features: by a linear
classifier of frozen features, fitted to 10,000 training images at each evaluation.
"""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

_LAYERS = tf_keras.layers
_PROBE = 10_000  # training images that the linear classifier is fitted to


class Encoder(tf_keras.Model):
    """[rows, 28, 28, 1] images -> [rows, width] features; `project` computes what the loss compares."""

    def __init__(self, *, width, projection):
        super().__init__()
        self.features = tf_keras.Sequential(
            [
                _LAYERS.Conv2D(32, 3, strides=2, activation="relu"),
                _LAYERS.Conv2D(64, 3, strides=2, activation="relu"),
                _LAYERS.Flatten(),
                _LAYERS.Dense(width, activation="relu"),
            ]
        )
        self.project = tf_keras.Sequential(
            [_LAYERS.Dense(width, activation="relu"), _LAYERS.Dense(projection)]
        )

    def call(self, x):
        return self.project(self.features(x))


class SimclrTrainer(ctl.StandardTrainer):
    """Trains an encoder by the normalized temperature-scaled cross-entropy."""

    def build_model(self):
        width, projection = self.options.model.width, self.options.model.projection
        return Encoder(width=width, projection=projection)

    def build_dataset(self, split, input_context):
        return ctl.data.idx(self.options.data.dir, split)

    def forward(self, batch, training):
        images = batch["image"][..., tf.newaxis]
        views = [transform(images, name) for name in ("first", "second")]
        return tf.stack([self.model(view) for view in views], axis=1)  # [rows, 2, projection]

    def per_example_loss(self, batch, outputs):
        own = tf.math.l2_normalize(outputs, axis=2)
        every = ctl.replica.all_gather(own)  # [all rows, 2, projection]
        similarity = tf.einsum("rvd,awd->rvaw", own, every) / self.options.model.temperature
        logits = tf.reshape(similarity, [tf.shape(own)[0], 2, -1])
        # View v of row i is number 2 i + v. It is not compared with itself.
        number = 2 * ctl.replica.positions(own)[:, tf.newaxis] + tf.range(2)
        itself = tf.one_hot(number, tf.shape(logits)[2], on_value=-1e9, off_value=0.0)
        other = tf.reverse(number, axis=[1])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            other, logits + tf.cast(itself, logits.dtype)
        )
        return tf.reduce_mean(losses, axis=1)

    def collect_outputs(self, batch, outputs):
        return {
            "features": self.model.features(batch["image"][..., tf.newaxis]),
            "label": batch["label"],
        }

    def compute_metrics(self, collected):
        source = ctl.data.idx(self.options.data.dir, "train")
        rows = self.preprocess(source.gather(tf.range(min(_PROBE, len(source)), dtype=tf.int64)))
        features = self.model.features.predict(rows["image"][..., tf.newaxis], verbose=0)
        weights = fit(features, rows["label"].numpy())
        predicted = with_bias(collected["features"]) @ weights
        return {"probe_accuracy": np.mean(predicted.argmax(axis=1) == collected["label"])}


def transform(images, name):
    """Moves, rotates and scales each image by random numbers of its own, which `name` identifies."""

    def draw(what, low, high):
        return ctl.random.uniform([None], low, high, name=f"{name}/{what}")

    angle, scale = draw("angle", -0.4, 0.4), draw("scale", 0.7, 1.3)
    a, b, center = tf.cos(angle) * scale, tf.sin(angle) * scale, 13.5
    dx, dy = draw("dx", -4.0, 4.0), draw("dy", -4.0, 4.0)
    zero = tf.zeros_like(a)
    # The input position of each output position, around the center of the image.
    x0, y0 = center - a * center + b * center + dx, center - b * center - a * center + dy
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.stack([a, -b, x0, b, a, y0, zero, zero], axis=1),
        output_shape=[28, 28],
        fill_value=0.0,
        interpolation="BILINEAR",
    )


def fit(features, labels):
    """Fits a linear classifier of ten classes by least squares with a small penalty."""
    x, y = with_bias(features), np.eye(10)[labels]
    return np.linalg.solve(x.T @ x + 1e-3 * len(x) * np.eye(x.shape[1]), x.T @ y)


def with_bias(features):
    """Appends a column of ones."""
    return np.append(features, np.ones([len(features), 1]), axis=1).astype(np.float64)
