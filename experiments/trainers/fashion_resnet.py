"""A small residual network for 28 x 28 images and ten classes.

Its blocks normalize and activate before they convolve (He et al. 2016, "Identity mappings in deep
residual networks", arXiv:1603.05027). `model.sync_batch_norm` normalizes by the statistics of the
global batch.
"""

import tensorflow as tf
import tf_keras

import ctl

_LAYERS = tf_keras.layers


def convolve(x, filters, size=3, stride=1):
    return _LAYERS.Conv2D(
        filters, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal"
    )(x)


def activate(x):
    return _LAYERS.ReLU()(_LAYERS.BatchNormalization(momentum=0.9)(x))


def add_block(x, filters):
    """Adds two convolutions to a projection of their input, at half the resolution."""
    y = activate(x)
    shortcut = convolve(y, filters, size=1, stride=2)
    y = activate(convolve(y, filters, stride=2))
    return shortcut + convolve(y, filters)


class FashionResNetTrainer(ctl.StandardTrainer):
    """Trains on images that are moved and reflected at random, with smoothed labels."""

    def build_model(self):
        x = inputs = tf_keras.Input([28, 28])
        x = _LAYERS.Reshape([28, 28, 1])(x)
        x = convolve(x, self.options.model.stem)
        for filters in self.options.model.widths:
            x = add_block(x, filters)
        x = _LAYERS.GlobalAveragePooling2D()(activate(x))
        return tf_keras.Model(inputs, _LAYERS.Dense(10)(x))

    def build_dataset(self, split, input_context):
        source = ctl.data.idx(self.options.data.dir, split)
        return ctl.data.augmented(source, augment) if split == "train" else source

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.categorical_crossentropy(
            tf.one_hot(batch["label"], 10),
            outputs,
            from_logits=True,
            label_smoothing=self.options.model.label_smoothing,
        )

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}


def augment(example, seed):
    """Reflects an image half the time, and moves it by up to two pixels on each axis."""
    flip, y, x = tf.unstack(tf.random.stateless_uniform([3], seed, maxval=1 << 30, dtype=tf.int32))
    image = tf.pad(example["image"], [[2, 2], [2, 2]])[y % 5 :, x % 5 :][:28, :28]
    image = tf.where(flip % 2 == 0, image, tf.reverse(image, [1]))
    return {**example, "image": tf.ensure_shape(image, [28, 28])}
