"""A traced step that a loop calls once per step, with little time in Python."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl.data.autograph import traced
from ctl.replica.step.attributes import freezing
from ctl.replica.step.replica_step import ReplicaStep


class StepFunction:
    """Calls a function of a batch as a `tf.function`, traced again if a layer is frozen, for example.

    `tf.function` looks up its trace by the structure, the shapes and the dtypes of the arguments, which
    takes as long as a small step. Here a batch of the same kind as the last one gets the same trace.

        function = StepFunction(run, step)
        result = function(batch)

    Args:
        function: the function, in ctl.
        step: the step that it runs; its state decides when the function is traced again.
    """

    def __init__(self, function: Callable[[Any], Any], step: ReplicaStep):
        self._python_function = function
        self._step = step
        # A tuple, because the models in lists are searched for further models.
        self._layers: tuple[Any, ...] = ()
        self._state: Any = None
        self._traced: Any = None
        self._batch: Any = None  # the structure of the last batch
        self._specs: Any = None
        self._concrete: Any = None

    def __call__(self, batch: Any) -> Any:
        """Calls the function with a batch, in eager execution."""
        if self._state is None or self._state != self._read_state():
            self._renew()
        values = tf.nest.flatten(batch)
        # The parts of distributed values have specs of their own, and their steps take longer anyway.
        if tf.config.functions_run_eagerly() or not all(map(_is_plain, values)):
            return self._traced(batch)
        specs = [None if value is None else (value.shape, value.dtype) for value in values]
        if specs != self._specs or not self._has_same_structure(batch):
            self._concrete = self._traced.get_concrete_function(batch)
            self._specs, self._batch = specs, tf.nest.map_structure(lambda _: 0, batch)
        return self._concrete(batch)

    def _renew(self) -> None:
        attributes = self._step.attributes
        attributes.check_slot_variables()
        self._layers = tuple(attributes.layers())
        self._state = self._read_state()
        self._traced = traced(self._python_function, reduce_retracing=True)
        self._specs = None

    def _read_state(self) -> Any:
        # A layer that gets another layer is noticed, too.
        layers = [
            (freezing(layer), [_size(each) for each in layer._self_tracked_trackables])
            for layer in self._layers
        ]
        return layers, self._step.attributes.optimizer

    def _has_same_structure(self, batch: Any) -> bool:
        try:
            tf.nest.assert_same_structure(batch, self._batch)
        except (TypeError, ValueError):
            return False
        return True


def _size(tracked: Any) -> int:
    """Counts the layers of an attribute that is a list or dict, to which a user may append."""
    return len(tracked) if isinstance(tracked, list | dict) else 1


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, tf.Tensor)
