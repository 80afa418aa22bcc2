"""Functions of `tf.nn` with a faster gradient, in steps that XLA compiles for a GPU.

- `gelu` in 16 bits (Hendrycks and Gimpel 2016, arXiv:1606.08415). For its gradient XLA stores erfc and a
  product besides the input, which are the largest tensors of a Transformer.
- `max_pool` of images. For its gradient XLA searches each window again, writes the positions of the
  largest elements as four integers each, and adds to the gradient at these positions one by one.

Elsewhere, for other arguments, and with `runtime.kernels=off`, both are as in TensorFlow.
"""

from collections.abc import Callable, Mapping
import functools
import inspect
import itertools
import math
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.source import Nest
from ctl.graphs.ops import is_compiled_for_gpu
from ctl.private.tensorflow import gen_xla_ops
from ctl.rows import row_mask

_MOST = 9  # elements of a window; each one adds operations to the program


def _is_compiled(tensor: tf.Tensor) -> bool:
    rows = row_mask.current()
    uses_kernels = rows is not None and rows.kernels and isinstance(tensor, tf.Tensor)
    return uses_kernels and is_compiled_for_gpu(tensor)


def gelu(original: Any, features: Nest, approximate: bool = False, name: Any = None) -> tf.Tensor:
    """Computes `tf.nn.gelu`."""
    if approximate or not _is_compiled(features) or features.dtype not in (tf.bfloat16, tf.float16):
        return original(features, approximate, name)
    return _gelu_of_16_bits(features)


@tf.custom_gradient
def _gelu_of_16_bits(features: tf.Tensor) -> Any:
    """Returns x cdf(x), computed in float32 and rounded once."""

    def gradient(d_outputs: tf.Tensor) -> tf.Tensor:
        x = tf.cast(features, tf.float32)
        density = tf.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        wide = tf.cast(d_outputs, tf.float32) * (_cdf(x) + x * density)
        # Otherwise XLA stores it in float32, for the gradient of the bias before it.
        return _barrier(tf.cast(wide, features.dtype))

    x = tf.cast(features, tf.float32)
    return tf.cast(x * _cdf(x), features.dtype), gradient


@tf.custom_gradient
def _barrier(x: tf.Tensor) -> Any:
    return gen_xla_ops.xla_optimization_barrier([x])[0], lambda d_outputs: d_outputs


def _cdf(x: tf.Tensor) -> tf.Tensor:
    # Not erfc, which XLA would store. The error of 1 + erf is 1e-7, and that of x cdf(x) below 1e-6.
    return 0.5 * (1 + tf.math.erf(math.sqrt(0.5) * x))


def max_pool(original: Callable[..., tf.Tensor], *args: Any, **kwargs: Any) -> tf.Tensor:
    """Computes `tf.nn.max_pool2d` and `tf.compat.v1.nn.max_pool`."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    x = given.get("value", given.get("input"))
    windows = _windows(x, given) if _is_compiled(x) else None
    return original(*args, **kwargs) if windows is None else _pool(x, *windows)


def _windows(x: tf.Tensor, given: Mapping[str, Any]) -> list["_Windows"] | None:
    """Returns the windows of the height and the width; None for arguments that `_pool` lacks."""
    fits = x.dtype.is_floating and given.get("data_format") in (None, "NHWC")
    if not fits or x.shape.rank != 4 or not x.shape.is_fully_defined():
        return None
    sizes, steps = _two_numbers(given["ksize"]), _two_numbers(given["strides"])
    if not sizes or not steps or given["padding"] not in ("VALID", "SAME"):
        return None
    windows = [
        _Windows(n, size, step, given["padding"] == "SAME")
        for n, size, step in zip(x.shape[1:3], sizes, steps, strict=True)
    ]
    covers = all(each.step <= each.size and each.count > 0 for each in windows)
    return windows if covers and math.prod(sizes) <= _MOST else None


def _two_numbers(value: Any) -> list[int] | None:
    """Returns the numbers of the height and the width in an argument of `tf.nn.max_pool`."""
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    if len(numbers) == 4 and numbers[0] == numbers[3] == 1:
        numbers = numbers[1:3]
    is_known = all(isinstance(n, int | np.integer) for n in numbers)
    return {1: numbers * 2, 2: numbers}.get(len(numbers)) if is_known else None


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


def _pool(x: tf.Tensor, vertical: _Windows, horizontal: _Windows) -> tf.Tensor:
    """Returns the largest element of each window of [rows, height, width, channels] images."""
    offsets = list(itertools.product(range(vertical.size), range(horizontal.size)))

    @tf.custom_gradient
    def pool(x: tf.Tensor) -> Any:
        padded = tf.pad(
            x, [(0, 0), vertical.padding, horizontal.padding, (0, 0)], constant_values=-math.inf
        )
        elements = [padded[:, vertical.elements(i), horizontal.elements(j)] for i, j in offsets]
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
                part = tf.pad(part, [(0, 0), vertical.place(i), horizontal.place(j), (0, 0)])
                sums.setdefault((i % vertical.step, j % horizontal.step), []).append(part)
            blocks = [
                tf.stack([tf.add_n(sums[i, j]) for j in range(horizontal.step)], axis=3)
                for i in range(vertical.step)
            ]
            rows, _, _, channels = x.shape
            shape = [
                rows,
                vertical.blocks * vertical.step,
                horizontal.blocks * horizontal.step,
                channels,
            ]
            whole = tf.reshape(tf.stack(blocks, axis=2), shape)
            (top, _), (left, _) = vertical.padding, horizontal.padding
            return whole[:, top : top + vertical.length, left : left + horizontal.length]

        return largest, gradient

    return pool(x)
