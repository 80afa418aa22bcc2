"""A traced function of a batch that a loop calls once per step, with little time in Python."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl.data.autograph import traced
from ctl.data.source import Nest


class TracedFunction:
    """Calls a function of a batch as a `tf.function`.

    `tf.function` looks up its trace by the structure, the shapes and the dtypes of the arguments, which
    takes as long as a small step. Here a batch of the same kind as the last one gets the same trace.

    Args:
        function: the function, in ctl.
    """

    def __init__(self, function: Callable[[Nest], Nest]):
        self._traced: Any = traced(function, reduce_retracing=True)
        self._batch: Nest = None  # the structure of the last batch
        self._specs: Nest = None
        self._concrete: Any = None

    def __call__(self, batch: Nest) -> Nest:
        """Calls the function with a batch, in eager execution."""
        values = tf.nest.flatten(batch)
        # The components of distributed values have specs of their own, and their steps take longer.
        if tf.config.functions_run_eagerly() or not all(map(_is_plain, values)):
            return self._traced(batch)
        specs = [None if value is None else (value.shape, value.dtype) for value in values]
        if specs != self._specs or not self._has_same_structure(batch):
            self._concrete = self._traced.get_concrete_function(batch)
            # Without its tensors, which would stay in memory until the next trace.
            self._specs, self._batch = specs, tf.nest.map_structure(lambda _: 0, batch)
        return self._concrete(batch)

    def _has_same_structure(self, batch: Nest) -> bool:
        try:
            tf.nest.assert_same_structure(batch, self._batch)
        except (TypeError, ValueError):
            return False
        return True


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, tf.Tensor)
