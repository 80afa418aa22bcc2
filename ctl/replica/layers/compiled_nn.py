"""Functions of `tf.nn` with a faster gradient, in steps that XLA compiles for a GPU.

- `gelu` in 16 bits (Hendrycks and Gimpel 2016, arXiv:1606.08415). For its gradient XLA stores erfc and a
  product besides the input, which are the largest tensors of a Transformer.
- `max_pool` of images. For its gradient XLA searches each window again, writes the positions of the
  largest elements as four integers each, and adds to the gradient at these positions one by one.

Elsewhere, and for other arguments, both are as in TensorFlow.
"""

from collections.abc import Callable
import functools
import itertools
import math
from typing import Any

import tensorflow as tf

from ctl.private.tensorflow import gen_xla_ops
from ctl.replica.arithmetic import row_mask
from ctl.replica.graphs.ops import is_compiled_for_gpu

_MOST = 9  # elements of a window: each is an operation of its own


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Makes a function compute by another one in such a step, unless that returns None."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> tf.Tensor:
        outputs = None if row_mask.current() is None else function(*args, **kwargs)
        return original(*args, **kwargs) if outputs is None else outputs

    setattr(owner, name, run)


def _is_compiled(tensor: Any) -> bool:
    return tf.is_tensor(tensor) and is_compiled_for_gpu(tensor)


def _gelu(features: Any, approximate: bool = False, name: Any = None) -> tf.Tensor | None:
    if approximate or not _is_compiled(features) or features.dtype not in (tf.bfloat16, tf.float16):
        return None
    return _gelu_of_16_bits(features)


@tf.custom_gradient
def _gelu_of_16_bits(features: tf.Tensor) -> Any:
    """Returns x cdf(x), computed in float32 and rounded once."""

    def gradient(d_outputs: tf.Tensor) -> tf.Tensor:
        x = tf.cast(features, tf.float32)
        density = tf.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        wide = tf.cast(d_outputs, tf.float32) * (_cdf(x) + x * density)
        # Otherwise XLA stores it in float32, for the gradient of the bias before it.
        return gen_xla_ops.xla_optimization_barrier([tf.cast(wide, features.dtype)])[0]

    x = tf.cast(features, tf.float32)
    return tf.cast(x * _cdf(x), features.dtype), gradient


def _cdf(x: tf.Tensor) -> tf.Tensor:
    # Not erfc, which XLA would store. The error of 1 + erf is 1e-7, and that of x cdf(x) below 1e-6.
    return 0.5 * (1 + tf.math.erf(math.sqrt(0.5) * x))


def _max_pool(
    input: Any, ksize: Any, strides: Any, padding: Any, data_format: Any = None, name: Any = None
) -> tf.Tensor | None:
    sizes, steps = _two_numbers(ksize), _two_numbers(strides)
    fits = _is_compiled(input) and input.dtype.is_floating and data_format in (None, "NHWC")
    fits = fits and input.shape.rank == 4 and input.shape.is_fully_defined()
    if not fits or not sizes or not steps or padding not in ("VALID", "SAME"):
        return None
    windows = [
        _Windows(n, size, step, padding == "SAME")
        for n, size, step in zip(input.shape[1:3], sizes, steps, strict=True)
    ]
    can_read = math.prod(sizes) <= _MOST and min(each.count for each in windows) > 0
    return _pool(input, *windows) if can_read else None


def _two_numbers(value: Any) -> list[int] | None:
    """Returns the numbers of the height and the width in an argument of `tf.nn.max_pool`."""
    numbers = [value] if isinstance(value, int) else list(value)
    if len(numbers) == 4 and numbers[0] == numbers[3] == 1:
        numbers = numbers[1:3]
    return {1: numbers * 2, 2: numbers}.get(len(numbers))


class _Windows:
    """The windows along an axis of `length` elements, with the padding of TensorFlow.

    Attributes:
        padding: the number of elements before and after the axis.
        count: the number of windows.
        blocks: the number of parts of `step` elements, of which the last one may exceed the axis.
    """

    def __init__(self, length: int, size: int, step: int, is_same: bool):
        missing = max(0, (-(-length // step) - 1) * step + size - length) * is_same
        self.length, self.size, self.step = length, size, step
        self.padding = missing // 2, missing - missing // 2
        self.count = (length + missing - size) // step + 1
        self.blocks = -(-(length + missing) // step)

    def elements(self, offset: int) -> slice:
        """Returns where the axis has the element of each window at an offset."""
        return slice(offset, offset + (self.count - 1) * self.step + 1, self.step)

    def place(self, offset: int) -> tuple[int, int]:
        """Returns the number of blocks before and after those with the elements at an offset."""
        before = offset // self.step
        return before, self.blocks - self.count - before


def _pool(x: tf.Tensor, high: _Windows, wide: _Windows) -> tf.Tensor:
    """Returns the largest element of each window of [rows, height, width, channels] images."""
    offsets = list(itertools.product(range(high.size), range(wide.size)))

    @tf.custom_gradient
    def pool(x: tf.Tensor) -> Any:
        padded = tf.pad(x, [(0, 0), high.padding, wide.padding, (0, 0)], constant_values=-math.inf)
        elements = [padded[:, high.elements(i), wide.elements(j)] for i, j in offsets]
        largest = functools.reduce(tf.maximum, elements)
        # The first of equal elements, as in TensorFlow.
        first = tf.fill(largest.shape, tf.constant(len(offsets) - 1, tf.int8))
        for k in reversed(range(len(offsets) - 1)):
            first = tf.where(elements[k] == largest, tf.constant(k, tf.int8), first)

        def gradient(d_outputs: tf.Tensor) -> tf.Tensor:
            # By the place of an element in its block of `step` x `step`.
            sums: dict[tuple[int, int], list[tf.Tensor]] = {}
            for k, (i, j) in enumerate(offsets):
                part = tf.where(first == k, d_outputs, tf.zeros([], d_outputs.dtype))
                part = tf.pad(part, [(0, 0), high.place(i), wide.place(j), (0, 0)])
                sums.setdefault((i % high.step, j % wide.step), []).append(part)
            nothing = tf.zeros([x.shape[0], high.blocks, wide.blocks, x.shape[3]], x.dtype)
            blocks = [
                tf.stack([tf.add_n(sums.get((i, j), [nothing])) for j in range(wide.step)], axis=3)
                for i in range(high.step)
            ]
            rows, _, _, channels = x.shape
            shape = [rows, high.blocks * high.step, wide.blocks * wide.step, channels]
            whole = tf.reshape(tf.stack(blocks, axis=2), shape)
            (top, _), (left, _) = high.padding, wide.padding
            return whole[:, top : top + high.length, left : left + wide.length]

        return largest, gradient

    return pool(x)


# By these modules Keras 3 and tf_keras call them. At import, because a layer of tf_keras keeps the
# function that it finds when it is made.
for _module in (tf.nn, tf.compat.v2.nn, tf.compat.v1.nn, tf.compat.v2.compat.v1.nn):
    _replace(_module, "max_pool", _max_pool)
for _module in (tf.nn, tf.compat.v2.nn):
    _replace(_module, "gelu", _gelu)
    _replace(_module, "max_pool2d", _max_pool)
