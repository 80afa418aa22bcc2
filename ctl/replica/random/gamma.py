"""Draws gamma numbers that are keyed by row: every element uses the same number of draws."""

import dataclasses
import math
from typing import Any

import tensorflow as tf

from ctl.replica.random import draws, philox
from ctl.replica.random.draws import Stream

_TRIES = 12  # each is rejected with a probability of at most 0.05, so all are with 2e-16


def log_gamma(shape: Any, alpha: float, stream: Stream, dtype: tf.DType, **rows: Any) -> tf.Tensor:
    """Draws logarithms of gamma numbers (Marsaglia and Tsang 2000).

    The number of tries is fixed, and the first accepted one counts: so each element uses the same
    number of draws, whatever its values are.
    """
    # An element needs a normal number, a uniform number, and a uniform number for the boost.
    streams = [dataclasses.replace(stream, identity=stream.identity + part) for part in "nub"]

    def unit(shape: Any, stream: Stream) -> tf.Tensor:
        numbers = draws.uniform(shape, stream, **rows)
        return tf.cast(numbers, philox.working_dtype(dtype)) + 2.0**-24  # in (0, 1)

    boost = alpha < 1  # the method requires alpha >= 1: G(alpha) = G(alpha + 1) U^(1 / alpha)
    d = (alpha + 1 if boost else alpha) - 1 / 3
    tries = tf.concat([tf.cast(shape, tf.int32), [_TRIES]], axis=0)
    x = draws.normal(tries, streams[0], dtype=dtype, **rows)
    v = (1 + x / math.sqrt(9 * d)) ** 3
    log_v = tf.math.log(tf.maximum(v, 1e-30))
    accepted = (v > 0) & (tf.math.log(unit(tries, streams[1])) < 0.5 * x * x + d * (1 - v + log_v))
    first = tf.argmax(tf.cast(accepted, tf.int32), axis=-1)
    logs = math.log(d) + tf.gather(log_v, first, batch_dims=len(log_v.shape) - 1)
    return logs + tf.math.log(unit(shape, streams[2])) / alpha if boost else logs
