"""Measures how long the steps of an inner loop wait for their batches, and for other processes."""

from collections.abc import Iterator
import contextlib
from typing import Any

import tensorflow as tf

from ctl.data.source import Nest
from ctl.graphs import ops
from ctl.hardware import devices, strategies
from ctl.private.tensorflow import config

# Global and not thread-local, because tf.distribute traces each local replica in a separate thread.
_ACTIVE: "ReductionWait | None" = None


class _Wait:
    """Seconds that steps add up on the host, with two clock readings and one addition for each wait.

    Args:
        replicas: the number of replicas that add their own waits; None for one wait of the process.
        is_supported: whether the strategy's steps can read a clock of this host.
    """

    def __init__(self, replicas: int | None, is_supported: bool):
        self._replicas = replicas
        self._is_supported = is_supported
        self._seconds: tf.Variable | None = None
        self._is_used = False

    def enable(self) -> None:
        """Measures in all functions that are traced after this call.

        Nothing is measured under `runtime.deterministic`, where TensorFlow rejects `tf.timestamp`.
        """
        is_supported = self._is_supported and not config.is_op_determinism_enabled()
        if is_supported and self._seconds is None:
            with tf.init_scope(), tf.device("CPU:0"):
                zeros = tf.zeros([self._replicas] if self._replicas else [], tf.float64)
                self._seconds = tf.Variable(zeros, trainable=False)

    def reset(self) -> None:
        """Starts again from zero."""
        if self._seconds is not None:
            self._seconds.assign(tf.zeros_like(self._seconds))

    def read(self) -> float | None:
        """Returns the seconds since the last reset; None if nothing was measured.

        A process with several replicas waits as long as the one that waits the least.
        """
        if self._seconds is None or not self._is_used:
            return None
        # The sum is negative if the clock was set back.
        return max(0.0, float(self._seconds.numpy().min()))

    def _begin(self, before: Any) -> tf.Tensor:
        """Reads the clock as soon as some tensors are computed."""
        self._is_used = True
        with _clock(before):
            return tf.timestamp()

    def _end(self, begin: tf.Tensor, after: Any) -> tf.Tensor:
        """Adds the time until other tensors are computed, and returns it."""
        assert self._seconds is not None
        with _clock(after):
            seconds = tf.timestamp() - begin
            own = seconds
            if self._replicas:
                context = tf.distribute.get_replica_context()
                replica = context.replica_id_in_sync_group % self._replicas
                own *= tf.one_hot(replica, self._replicas, dtype=tf.float64)
            self._seconds.assign_add(own)
        return seconds


class InputWait(_Wait):
    """Measures the time between the request for a batch and its arrival on all local replicas.

        wait = InputWait(strategy)
        wait.enable()
        element = wait.next(iterator)  # in each step
        wait.read()                    # seconds since the last `reset`

    A step gets no synchronization. Until `enable` is called, `next` adds no operation. The host of a GPU
    may launch steps ahead of the device: the time is then an upper bound of the time that the device
    waits.

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
        super().__init__(None, not strategies.spec_of(strategy).remote)

    def next(self, iterator: Iterator[Nest]) -> Nest:
        """Returns the next element of an iterator, in eager mode or in a graph."""
        if self._seconds is None:
            return next(iterator)
        begin = self._begin(())
        with tf.control_dependencies([begin]):
            element = next(iterator)
        seconds = self._end(begin, element)
        if not self._shares_processor:
            return element

        def after_arrival(element: Nest, seconds: tf.Tensor) -> Nest:
            with tf.control_dependencies([seconds]):
                return tf.nest.map_structure(lambda v: v if v is None else tf.identity(v), element)

        return self._strategy.run(after_arrival, args=(element, seconds))


class ReductionWait(_Wait):
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

    The clock readings do not change or delay a reduction. The reduction of the example weights is not
    measured: it runs during the forward pass, whose time would then count twice.

    Args:
        strategy: the strategy of the steps. Nothing is measured unless its replicas are on the CPUs of
            several processes that reduce with each other.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        local = devices.replica_devices(strategy)
        # Steps on a TPU cannot read a clock, and those of parameter servers reduce nothing. With GPUs,
        # the host reads its clock when it has queued the gradients, before they are computed.
        is_supported = (
            not strategies.spec_of(strategy).remote
            and strategy.num_replicas_in_sync > len(local)
            and all("CPU" in device for device in local)
        )
        super().__init__(len(local), is_supported)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Measures the reductions that are traced in the `with` block."""
        global _ACTIVE
        previous, _ACTIVE = _ACTIVE, self
        try:
            yield
        finally:
            _ACTIVE = previous

    def add(self, inputs: Nest, results: Nest) -> None:
        """Measures one reduction, as `observe`."""
        if self._seconds is not None and not tf.executing_eagerly():
            self._end(self._begin(inputs), results)


def observe(inputs: Nest, results: Nest) -> None:
    """Measures one reduction with the active `ReductionWait`, if any; call it in a replica context.

    Args:
        inputs: this replica's contribution, tensors in any structure.
        results: what the reduction returned.
    """
    if _ACTIVE is not None:
        _ACTIVE.add(inputs, results)


def _tensors(values: Nest) -> list[tf.Tensor]:
    flat = tf.nest.flatten(values, expand_composites=True)
    return [value for value in flat if tf.is_tensor(value)]


@contextlib.contextmanager
def _clock(values: Nest) -> Iterator[None]:
    """Reads the time inside once values are computed; its name tells the checks that ctl does."""
    with tf.control_dependencies(_tensors(values)), tf.device("CPU:0"), tf.name_scope(ops.CLOCK):
        yield
