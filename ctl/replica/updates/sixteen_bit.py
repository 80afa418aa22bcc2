"""Gradients that are sent and summed in float16 or bfloat16, with error feedback.

The rounding error of a replica's contribution is added to its next contribution (Seide et al. 2014,
"1-bit stochastic gradient descent"). The rounding error of the sums over the replicas is lost, because
no replica can compute it.
"""

from collections.abc import Callable, Sequence
import math

import numpy as np
import tensorflow as tf

Sum = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]

# The largest absolute value of a sum over all replicas. It is a power of two, so that the bound of each
# replica, this number divided by a power of two, is exact in float16, and a sum of contributions at the
# bound is not rounded up to infinity.
_LARGEST = {tf.float16: 2.0**15, tf.bfloat16: 2.0**126}


class SixteenBit:
    """Reduces values over the replicas in a 16-bit dtype.

    Args:
        dtype: the dtype in which values are sent.
    """

    def __init__(self, dtype: tf.DType):
        self._dtype = dtype

    def sent_bytes(self, shape: Sequence[int], dtype: tf.DType) -> int:
        """Returns the bytes that a replica sends for a variable of this shape, of any dtype."""
        return math.prod(shape) * self._dtype.size

    def applies(self, shape: Sequence[int]) -> bool:
        """Returns whether a variable of this shape is compressed: every variable is."""
        return True

    def initial_factor(self, shape: Sequence[int], index: int) -> np.ndarray | None:
        """Returns None: this method keeps no state except for the errors."""
        return None

    def reduce(
        self,
        values: Sequence[tf.Tensor],
        factors: Sequence[tf.Tensor],
        others: Sequence[tf.Tensor],
        sum_over_replicas: Sum,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Reduces gradients; see `PowerSgd.reduce`."""
        sent = [self._round(value) for value in values]
        errors = [
            value - tf.cast(part, value.dtype) for value, part in zip(values, sent, strict=True)
        ]
        sums = sum_over_replicas([*sent, *others])
        updates = [tf.cast(total, value.dtype) for value, total in zip(values, sums, strict=False)]
        return updates, errors, [], sums[len(values) :]

    def _round(self, value: tf.Tensor) -> tf.Tensor:
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        # If an element could overflow in the sum, a part of it is sent now, and the rest in later steps.
        # Infinity and NaN are sent unchanged, so that the step detects them.
        bound = _LARGEST[self._dtype] / 2 ** int(np.ceil(np.log2(replicas)))
        clipped = tf.clip_by_value(value, -bound, bound)
        return tf.cast(tf.where(tf.math.is_finite(value), clipped, value), self._dtype)
