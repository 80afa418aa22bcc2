"""Which dtype a run computes in and keeps its variables in."""

from collections.abc import Iterator
import contextlib

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError

PRECISIONS = ("float32", "float64")


def variable_dtype(name: str) -> tf.DType:
    """The dtype of variables, losses and reductions."""
    _check(name)
    return tf.as_dtype(name)


def compute_dtype(name: str) -> tf.DType:
    """The dtype that layers compute in."""
    _check(name)
    return tf.as_dtype(name)


@contextlib.contextmanager
def building(name: str) -> Iterator[None]:
    """Makes layers, metrics and optimizers that are built inside use this precision."""
    _check(name)
    policy = tf_keras.mixed_precision.global_policy()
    floatx = tf_keras.backend.floatx()
    tf_keras.backend.set_floatx(name)
    tf_keras.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        tf_keras.backend.set_floatx(floatx)
        tf_keras.mixed_precision.set_global_policy(policy)


def _check(name: str) -> None:
    if name not in PRECISIONS:
        raise UsageError(f"There is no precision {name!r} yet: choose {' or '.join(PRECISIONS)}.")
