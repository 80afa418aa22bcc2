"""Runs graphs as they were traced."""

from collections.abc import Iterator
import contextlib

import tensorflow as tf


@contextlib.contextmanager
def without_graph_optimization() -> Iterator[None]:
    """Lets TensorFlow run graphs as they were traced, in a `with` block.

    Optimizing them takes longer than running them a few times, and prints errors of its own.
    """
    optimizer = tf.config.optimizer
    options = optimizer.get_experimental_options()
    optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        optimizer.set_experimental_options(options)
