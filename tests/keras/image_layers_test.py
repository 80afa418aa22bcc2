"""Random image layers of tf_keras compute per row what they compute for one row with the same number."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import stateless_random_ops
import tf_keras

from ctl.replica import examples

layers = tf_keras.layers
LAYERS = {
    "flip": lambda: layers.RandomFlip(),
    "horizontal": lambda: layers.RandomFlip("horizontal"),
    "contrast": lambda: layers.RandomContrast(0.4),
    "crop": lambda: layers.RandomCrop(3, 4),
    "rotation": lambda: layers.RandomRotation(0.2),
    "zoom": lambda: layers.RandomZoom((-0.3, 0.3)),
    "translation": lambda: layers.RandomTranslation(0.3, 0.3),
}
ROWS = 7
IMAGES = np.random.default_rng(0).uniform(0, 255, (ROWS, 5, 6, 3)).astype(np.float32)


class Numbers:
    """A generator whose numbers are those that a layer has drawn in a step, for one row."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    def random_uniform(self, shape, minval=0, maxval=1, dtype=None, **_):
        unit = self.numbers.pop(0)
        if dtype and not tf.as_dtype(dtype).is_floating:
            # The crop takes the remainders by the number of places, which is 3 on both axes.
            return tf.constant([int(unit * 3), int(self.numbers.pop(0) * 3)], dtype)
        return tf.fill(shape, tf.cast(unit * (maxval - minval) + minval, dtype or tf.float32))

    def make_seed_for_stateless_op(self):
        return [0, 0]


@functools.cache
def layer_of(name):
    layer = LAYERS[name]()
    layer(IMAGES, training=False)
    layer._random_generator  # noqa: B018 - creates it
    return layer


def compute(name, start, end, record=None):
    """The outputs of a layer for rows start..end of a global batch, and the numbers that it draws."""
    layer, numbers = layer_of(name), []
    draw = type(layer._random_generator).random_uniform

    def recorded(self, shape, minval=0.0, maxval=None, dtype=None, **options):
        value = draw(self, shape, minval, maxval, dtype, **options)
        numbers.append((value - minval) / ((1.0 if maxval is None else maxval) - minval))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer._random_generator), "random_uniform", recorded)

        @tf.function
        def call(images):
            with examples(first_row=start, step=tf.constant(3, tf.int64), count=end - start):
                outputs = layer(images, training=True)
            return outputs, list(numbers)

        outputs, drawn = call(tf.constant(IMAGES[start:end]))
    return outputs.numpy(), [np.reshape(n.numpy(), -1) for n in drawn]


@pytest.mark.parametrize("name", LAYERS)
def test_rows_are_those_of_the_global_batch_on_any_split(name):
    expected, numbers = compute(name, 0, ROWS)
    parts = [compute(name, start, end)[0] for start, end in ((0, 1), (1, ROWS))]
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-4)
    assert len({number for drawn in numbers for number in drawn}) == ROWS * len(numbers)


@pytest.mark.parametrize("name", ["flip", "horizontal", "contrast", "crop"])
def test_a_row_is_what_the_layer_of_tf_keras_makes_of_it_with_the_same_number(name, monkeypatch):
    outputs, numbers = compute(name, 0, ROWS)
    assert not np.allclose(outputs[0].std(), 0)
    layer = LAYERS[name]()
    layer(IMAGES, training=False)
    for row in range(ROWS):
        drawn = Numbers([float(n[row]) for n in numbers])
        layer._random_generator = drawn
        monkeypatch.setattr(
            stateless_random_ops,
            "stateless_random_uniform",
            lambda shape, minval=0, maxval=1, drawn=drawn, **_: drawn.random_uniform(
                shape, minval, maxval
            ),
        )
        original = layer(IMAGES[row : row + 1], training=True)[0]
        np.testing.assert_allclose(outputs[row], original, atol=1e-3)


def test_layers_do_nothing_random_in_an_evaluation():
    with examples(first_row=0, count=ROWS):
        for name, make in LAYERS.items():
            expected = make()(IMAGES, training=False)
            np.testing.assert_allclose(layer_of(name)(IMAGES, training=False), expected, atol=1e-5)
