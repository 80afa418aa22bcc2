"""The GELU of steps in 16 bits that XLA compiles for a GPU, with a gradient that needs its input alone.

For the gradient of `tf.nn.gelu` (Hendrycks and Gimpel 2016, arXiv:1606.08415) XLA stores erfc and a
product besides the input. These are the largest tensors of a Transformer.
"""

import functools
import math
from typing import Any

import tensorflow as tf

from ctl.private.tensorflow import gen_xla_ops
from ctl.replica.arithmetic import row_mask
from ctl.replica.graphs.ops import is_compiled_for_gpu

_MODULES = (tf.nn, tf.compat.v2.nn)  # by which Keras 3 and tf_keras call it


def prepare(model: Any, seed: int, *, scope: str) -> None:
    """Makes `tf.nn.gelu` compute by this module in such a step; called again, it does nothing."""
    original = tf.nn.gelu
    if hasattr(original, "ctl_replaces"):
        return

    @functools.wraps(original)
    def gelu(features: Any, approximate: bool = False, name: str | None = None) -> tf.Tensor:
        is_short = tf.is_tensor(features) and features.dtype in (tf.bfloat16, tf.float16)
        is_step = is_short and not approximate and row_mask.current() is not None
        if is_step and is_compiled_for_gpu(features):
            return _gelu(features)
        return original(features, approximate, name)

    gelu.ctl_replaces = True  # type: ignore[attr-defined]
    for module in _MODULES:
        module.gelu = gelu


@tf.custom_gradient
def _gelu(features: tf.Tensor) -> Any:
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
