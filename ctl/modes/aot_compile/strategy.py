"""A strategy of many replicas that is only traced: what it traces is what one core of a TPU runs."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from typing import Any

import tensorflow as tf

# TensorFlow has these under private names alone.
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.distribute import distribute_lib, one_device_strategy

from ctl.errors import UsageError
from ctl.modes.aot_compile.aggregated import aggregated

_NESTED = (
    "The step calls strategy.run inside of strategy.run, and a TPU's programs cannot be nested: call "
    "it once, in train_step."
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """What one call of `run` hands to the TPU.

    Attributes:
        function: the replica's code, to be compiled by XLA.
        specs: of its tensors.
    """

    function: Any
    specs: list[tf.TensorSpec]


class SliceStrategy(tf.distribute.TPUStrategy):
    """Traces one replica of many, whose reductions are all-reduces over all of them.

        strategy = SliceStrategy(8)
        with strategy.scope():
            trainer = ...
        tf.function(trainer.train_step).get_concrete_function(iterator)
        strategy.traced[0].function             # what the step gave to strategy.run

    A TPUStrategy, so that all who ask are told they are on a TPU. As there, a reduction in a
    replica's code is one XLA operation, and `replica_id_in_sync_group` a tensor that the core knows.
    The variables are one replica's, on this machine's CPU, where a program of one replica can run.

    Attributes:
        traced: what `run` was given inside a tf.function, in order.
    """

    def __init__(self, replicas: int):
        """Makes the strategy; it holds no device.

        Args:
            replicas: cores of the slice.
        """
        # Not TPUStrategy's own, which asks a TPU.
        tf.distribute.Strategy.__init__(self, _Extended(self, replicas))
        self.traced: list[Traced] = []

    def run(self, fn: Callable, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Calls a replica's code; inside a tf.function, as the program that a TPU would run."""
        del options
        if tf.executing_eagerly():
            return self.extended.call_for_each_replica(fn, args, kwargs)
        if self.extended.in_replica:
            raise UsageError(_NESTED)
        given = (tuple(args), dict(kwargs or {}))
        flat = tf.nest.flatten(given)
        places = [i for i, value in enumerate(flat) if tf.is_tensor(value)]

        def replica(*tensors: tf.Tensor) -> Any:
            values = list(flat)
            for i, tensor in zip(places, tensors, strict=True):
                values[i] = tensor
            own_args, own_kwargs = tf.nest.pack_sequence_as(given, values)
            with self.extended.replica():
                return fn(*own_args, **own_kwargs)

        function = tf.function(replica, jit_compile=True)
        tensors = [flat[i] for i in places]
        self.traced.append(Traced(function, [tf.TensorSpec(t.shape, t.dtype) for t in tensors]))
        return function(*tensors)


class _Extended(one_device_strategy.OneDeviceExtended):
    """One device, told that it is one of several."""

    def __init__(self, container: SliceStrategy, replicas: int):
        super().__init__(container, "/CPU:0")
        self._replicas = replicas
        self.num_hosts = 1
        self.in_replica = False

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._replicas

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        return aggregated(super()._create_variable(next_creator, **kwargs), kwargs)

    @contextlib.contextmanager
    def replica(self) -> Iterator[None]:
        """The context of a replica's code."""
        outside, self.in_replica = self.in_replica, True
        try:
            with _ReplicaContext(self._container_strategy()):
                yield
        finally:
            self.in_replica = outside

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with self.replica():
            return fn(*args, **kwargs)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        """An all-reduce, as TPUStrategy's in a replica's code; of Python numbers there is one."""
        del destinations, options
        if self._replicas == 1 or not tf.is_tensor(value) or tf.executing_eagerly():
            return value
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if not mean and reduce_op != tf.distribute.ReduceOp.SUM:
            raise UsageError(f"A TPU reduces by SUM or MEAN, not by {reduce_op}.")
        total = gen_xla_ops.xla_all_reduce(
            tf.convert_to_tensor(value),  # also of rows that are sparse, which XLA does not know
            group_assignment=[list(range(self._replicas))],
            reduce_op="Add",
            mode="CrossReplica",
        )
        return total / tf.cast(self._replicas, total.dtype) if mean else total

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        """One replica's dataset, made as one of all."""
        del options
        return dataset_fn(tf.distribute.InputContext(num_replicas_in_sync=self._replicas))

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        """One replica's share of ready global batches."""
        del options
        whole = tf.nest.flatten(dataset.element_spec)[0].shape[0]
        return dataset if whole is None else dataset.rebatch(-(-whole // self._replicas))


class _ReplicaContext(distribute_lib.ReplicaContext):
    """The context of whichever replica runs the program."""

    def __init__(self, strategy: SliceStrategy):
        one = strategy.num_replicas_in_sync == 1 or tf.executing_eagerly()
        super().__init__(
            strategy, replica_id_in_sync_group=0 if one else gen_xla_ops.xla_replica_id()
        )

    @property
    def devices(self) -> Any:
        return self.strategy.extended.worker_devices
