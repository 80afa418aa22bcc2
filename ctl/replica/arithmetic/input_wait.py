"""Measures how long the steps of an inner loop wait for their batches."""

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import config

from ctl.hardware import coordinator, devices


class InputWait:
    """Measures the time between the request for a batch and its arrival on all local replicas.

        wait = InputWait(strategy)
        wait.enable()
        element = wait.next(iterator)  # in each step
        wait.read()                    # seconds since the last `reset`

    A step gets two clock readings and one sum on the host, and no synchronization. Until `enable` is
    called, `next` adds no operation. The host of a GPU may launch steps ahead of the device: the time
    is then an upper bound of the time that the device waits.

    Args:
        strategy: the strategy of the steps. Nothing is measured with parameter servers and TPUs, whose
            steps get their batches on other hosts.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        # Replicas on CPUs share the host's threads: a step that has its batch would delay the second
        # reading, or the requests of other replicas, which is not a wait for input. So no replica
        # starts before the reading.
        self._shares_processor = all("CPU" in d for d in devices.replica_devices(strategy))
        self._is_supported = not (
            coordinator.is_coordinated(strategy) or isinstance(strategy, tf.distribute.TPUStrategy)
        )
        self._seconds: tf.Variable | None = None
        self._is_used = False

    def enable(self) -> None:
        """Measures in all functions that are traced from here on.

        Nothing is measured under `runtime.deterministic`, where TensorFlow rejects `tf.timestamp`.
        """
        is_supported = self._is_supported and not config.is_op_determinism_enabled()
        if is_supported and self._seconds is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def next(self, iterator: Any) -> Any:
        """Returns the next element of an iterator, in eager mode or in a graph."""
        if self._seconds is None:
            return next(iterator)
        self._is_used = True
        with tf.device("CPU:0"):
            begin = tf.timestamp()
        with tf.control_dependencies([begin]):
            element = next(iterator)
        tensors = [t for t in tf.nest.flatten(element, expand_composites=True) if tf.is_tensor(t)]
        with tf.control_dependencies(tensors), tf.device("CPU:0"):
            seconds = tf.timestamp() - begin
            self._seconds.assign_add(seconds)
        if not self._shares_processor:
            return element

        def after_arrival(element: Any, seconds: tf.Tensor) -> Any:
            with tf.control_dependencies([seconds]):
                return tf.nest.map_structure(lambda v: v if v is None else tf.identity(v), element)

        return self._strategy.run(after_arrival, args=(element, seconds))

    def reset(self) -> None:
        """Starts again from zero."""
        if self._seconds is not None:
            self._seconds.assign(0.0)

    def read(self) -> float | None:
        """Returns the seconds since the last reset; None if no step has called `next`."""
        if self._seconds is None or not self._is_used:
            return None
        return max(0.0, float(self._seconds.numpy()))  # not negative if the clock was set back
