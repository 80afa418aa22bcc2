"""What the generators of tf_keras' layers draw in a step: numbers that are keyed by row."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.random import draws
from ctl.random.philox import Shape
from ctl.rows.trace import Stream


def _dropout(
    stream: Stream, inputs: tf.Tensor, rate: float, noise_shape: Shape | None = None
) -> tf.Tensor:
    """Drops elements of `inputs` as `tf.nn.dropout` does, by the numbers of their rows."""
    # A noise shape that starts with 1 has one mask for all rows: the mask of row 0 everywhere.
    shared = noise_shape is not None and draws.static_size(noise_shape) == 1
    return draws.dropout(inputs, stream, rate, noise_shape, shared=shared)


def _uniform(
    stream: Stream, shape: Shape, minval: float = 0.0, maxval: float | None = None,
    dtype: tf.DType | None = None, nonce: int | None = None,
) -> tf.Tensor:  # fmt: skip
    """Draws uniform numbers in [minval, maxval); axis 0 of `shape` is this replica's rows."""
    dtype = tf.as_dtype(dtype or tf_keras.backend.floatx())
    if not dtype.is_floating:
        _reject(stream, f"draws {dtype.name} numbers")
    if not tf.is_tensor(shape) and not len(shape):
        _reject(stream, "draws one number for its complete local batch")
    numbers = tf.cast(draws.uniform(shape, stream), dtype)
    return numbers * ((1.0 if maxval is None else maxval) - minval) + minval


def _normal(
    stream: Stream, shape: Shape, mean: float = 0.0, stddev: float = 1.0,
    dtype: tf.DType | None = None, nonce: int | None = None,
) -> tf.Tensor:  # fmt: skip
    """Draws normal numbers; axis 0 of `shape` is this replica's rows."""
    dtype = tf.as_dtype(dtype or tf_keras.backend.floatx())
    return tf.cast(draws.normal(shape, stream, dtype=dtype), dtype) * stddev + mean


def _truncated_normal(stream: Stream, *_: Any, **__: Any) -> Any:
    # Rejection sampling uses a varying number of draws per row.
    _reject(stream, "draws from a truncated normal distribution")


def _seed(stream: Stream) -> Any:
    _reject(stream, "draws for its complete local batch")


def _reject(stream: Stream, problem: str) -> None:
    raise UsageError(
        f"{stream.name} {problem}, which cannot be keyed by the rows of the global batch: do it in the "
        "input pipeline, draw with ctl.random, or use a layer that draws one number per element."
    )


# Method of `RandomGenerator` -> what draws in its place in a step.
KEYED: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "random_uniform": _uniform,
    "random_normal": _normal,
    "truncated_normal": _truncated_normal,
    "make_seed_for_stateless_op": _seed,
    "make_legacy_seed": _seed,
}
