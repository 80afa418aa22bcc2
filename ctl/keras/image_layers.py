"""RandomFlip, RandomContrast and RandomCrop of tf_keras with random numbers for each row.

These layers draw a seed, or two integers, for their local batch: in a step, each row gets numbers of its
own instead. The other random image layers of tf_keras draw numbers [rows, ...] and need no replacement.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.rows import row_mask


def _flip(layer: Any, images: tf.Tensor, training: bool) -> tf.Tensor:
    for is_random, axis in ((layer.horizontal, 2), (layer.vertical, 1)):
        if is_random and training:
            # As in tf.image.stateless_random_flip_left_right, which rounds the number.
            flipped = _draw(layer, images, 0.0, 1.0) > 0.5
            images = tf.where(flipped, tf.reverse(images, [axis]), images)
    return images


def _contrast(layer: Any, images: tf.Tensor, training: bool) -> tf.Tensor:
    if not training:
        return images
    factor = _draw(layer, images, 1.0 - layer.lower, 1.0 + layer.upper)
    values = tf.cast(images, factor.dtype)
    mean = tf.reduce_mean(values, axis=[1, 2], keepdims=True)
    return tf.cast(tf.clip_by_value((values - mean) * factor + mean, 0, 255), images.dtype)


def _crop(layer: Any, images: tf.Tensor, training: bool) -> tf.Tensor:
    sizes = layer.height, layer.width
    if None in images.shape[1:3]:
        raise UsageError(
            f"Layer {layer.name} crops images whose size is not known before the step runs: resize them "
            "to one size in the input pipeline."
        )
    if not training or any(a < b for a, b in zip(images.shape[1:3], sizes, strict=True)):
        return tf.cast(tf_keras.preprocessing.image.smart_resize(images, sizes), images.dtype)
    for axis, size in enumerate(sizes, start=1):
        places = tf.cast(images.shape[axis] - size + 1, tf.float32)
        # 0 <= number < 1, and the product may round up to `places`.
        start = tf.floor(tf.cast(_draw(layer, images, 0.0, 1.0)[:, 0, 0], tf.float32) * places)
        start = tf.cast(tf.minimum(start, places - 1), tf.int32)
        images = tf.gather(images, start + tf.range(size), axis=axis, batch_dims=1)
    return images


def _draw(layer: Any, images: tf.Tensor, low: float, high: float) -> tf.Tensor:
    """Draws a number for each image, [rows, 1, 1, 1]."""
    dtype = tf.float64 if images.dtype == tf.float64 else tf.float32
    shape = [tf.shape(images)[0], 1, 1, 1]
    return layer._random_generator.random_uniform(shape, low, high, dtype)


_KEYED: dict[type, Callable[..., tf.Tensor]] = {
    tf_keras.layers.RandomFlip: _flip,
    tf_keras.layers.RandomContrast: _contrast,
    tf_keras.layers.RandomCrop: _crop,
}


def call(original: Any, layer: Any, inputs: Any, training: Any = True) -> tf.Tensor:
    """Computes a layer with numbers of its rows in a step, and otherwise as tf_keras does."""
    rows = row_mask.current()
    if rows is None or rows.allow_unkeyed or not row_mask.in_step() or tf.is_tensor(training):
        return original(layer, inputs, training)
    images = tf.cast(inputs, layer.compute_dtype)
    keyed = next(keyed for cls, keyed in _KEYED.items() if isinstance(layer, cls))
    outputs = keyed(layer, images, bool(training))
    return tf.ensure_shape(outputs, layer.compute_output_shape(images.shape))
