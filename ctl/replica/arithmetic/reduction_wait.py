"""Measures how long a process waits for the others in the reductions of its steps."""

from collections.abc import Iterator
import contextlib
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import config

from ctl.hardware import devices

# Global and not thread-local, because tf.distribute traces each local replica in a separate thread.
_ACTIVE: "ReductionWait | None" = None


class ReductionWait:
    """Measures the time between a replica's contribution to a reduction and the reduction's result.

        wait = ReductionWait(strategy)
        wait.enable()
        with wait.active():                      # while the steps are traced
            total = context.all_reduce("SUM", value)
            observe(value, total)
        wait.read()                              # seconds since the last `reset`

    In synchronous training all processes take the same time for a loop, since the fast ones wait for
    the slow one in the reductions. The process that waits the least is the slow one. The shortest wait
    of all processes is the time that the transfer itself takes.

    Each measured reduction adds two clock readings and one addition on the host, which do not change or
    delay it. The reduction of the example weights is not measured: it runs during the forward pass,
    whose time would then count twice.

    Args:
        strategy: the strategy of the steps. Nothing is measured unless its replicas are on the CPUs of
            several processes that reduce with each other.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        local = devices.replica_devices(strategy)
        self._replicas = len(local)
        # Steps on a TPU cannot read a clock, and those of parameter servers reduce nothing. With GPUs,
        # the host reads its clock when it has queued the gradients, before they are computed.
        self._is_supported = (
            isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
            and strategy.num_replicas_in_sync > self._replicas
            and all("CPU" in device for device in local)
        )
        self._seconds: tf.Variable | None = None
        self._is_used = False

    def enable(self) -> None:
        """Measures reductions in all functions that are traced after this call.

        Nothing is measured under `runtime.deterministic`, where TensorFlow rejects `tf.timestamp`.
        """
        is_supported = self._is_supported and not config.is_op_determinism_enabled()
        if is_supported and self._seconds is None:
            with tf.init_scope(), tf.device("CPU:0"):
                zeros = tf.zeros([self._replicas], tf.float64)
                self._seconds = tf.Variable(zeros, trainable=False)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Measures the reductions that are traced in the `with` block."""
        global _ACTIVE
        previous, _ACTIVE = _ACTIVE, self
        try:
            yield
        finally:
            _ACTIVE = previous

    def add(self, inputs: Any, results: Any) -> None:
        """Measures one reduction; call it in a replica context.

        Args:
            inputs: this replica's contribution, tensors in any structure.
            results: what the reduction returned.
        """
        if self._seconds is None or tf.executing_eagerly():
            return
        self._is_used = True
        inputs, results = _tensors(inputs), _tensors(results)
        with tf.control_dependencies(inputs), tf.device("CPU:0"):
            begin = tf.timestamp()
        with tf.control_dependencies(results), tf.device("CPU:0"):
            seconds = tf.timestamp() - begin
            context = tf.distribute.get_replica_context()
            replica = context.replica_id_in_sync_group % self._replicas
            self._seconds.assign_add(
                seconds * tf.one_hot(replica, self._replicas, dtype=tf.float64)
            )

    def reset(self) -> None:
        """Starts again from zero."""
        if self._seconds is not None:
            self._seconds.assign(tf.zeros_like(self._seconds))

    def read(self) -> float | None:
        """Returns the seconds since the last reset; None if no reduction was measured.

        A process with several replicas waits as long as the one that waits the least.
        """
        if self._seconds is None or not self._is_used:
            return None
        # The sum is negative if the clock was set back.
        return max(0.0, float(self._seconds.numpy().min()))


def observe(inputs: Any, results: Any) -> None:
    """Measures one reduction with the active `ReductionWait`, if any; call it in a replica context.

    Args:
        inputs: this replica's contribution, tensors in any structure.
        results: what the reduction returned.
    """
    if _ACTIVE is not None:
        _ACTIVE.add(inputs, results)


def _tensors(values: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(values, expand_composites=True)
    return [value for value in flat if tf.is_tensor(value)]
