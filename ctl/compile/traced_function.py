"""A traced function of a batch that a loop calls once per step, with little time in Python."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ctl.data.autograph import traced
from ctl.data.source import Nest


class TracedFunction:
    """Calls a function of a batch as a `tf.function`.

    `tf.function` looks up its trace by the structure, the shapes and the dtypes of the arguments, which
    takes as long as a small step, and longer with distributed values. Here a batch of the same kind as
    the last one gets the same trace, and the tensors of its replicas are the arguments.

    Args:
        function: the function, in ctl.
    """

    def __init__(self, function: Callable[[Nest], Nest]):
        self._function = function
        self._traced: Any = traced(self._compute, reduce_retracing=True)
        self._kind: Nest = None  # the structure of the last batch
        self._specs: Nest = None
        self._concrete: Any = None

    def __call__(self, batch: Nest) -> Nest:
        """Calls the function with a batch, in eager execution."""
        values = tf.nest.flatten(batch)
        parts = [part for value in values for part in _parts_of(value)]
        if tf.config.functions_run_eagerly() or not all(map(_is_plain, parts)):
            return self._traced(batch)
        specs = [
            *map(type, values),
            *[part if part is None else (part.shape, part.dtype) for part in parts],
        ]
        if specs != self._specs or not self._has_same_structure(batch):
            self._kind = tf.nest.map_structure(_kind_of, batch)
            self._batch = batch  # of which the trace gets the structure
            self._concrete = self._traced.get_concrete_function(self._kind, parts)
            self._specs, self._batch = specs, None  # its tensors would stay in memory
        return self._concrete(self._kind, parts)

    def _compute(self, batch: Nest, parts: Sequence[tf.Tensor | None] | None = None) -> Nest:
        if parts is not None:
            left = iter(parts)
            pack = lambda value: _with_parts(value, [next(left) for _ in _parts_of(value)])  # noqa: E731
            batch = tf.nest.map_structure(pack, self._batch)
        return self._function(batch)

    def _has_same_structure(self, batch: Nest) -> bool:
        try:
            tf.nest.assert_same_structure(batch, self._kind)
        except (TypeError, ValueError):
            return False
        return True


def _parts_of(value: Any) -> Sequence[Any]:
    """Returns the values of the replicas, or the value itself if it is not distributed."""
    return value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)


def _with_parts(value: Any, parts: Sequence[Any]) -> Any:
    return type(value)(parts) if isinstance(value, tf.distribute.DistributedValues) else parts[0]


def _kind_of(value: Any) -> str:
    return f"{type(value).__name__} {len(_parts_of(value))}"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, tf.Tensor)
