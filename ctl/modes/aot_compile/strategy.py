"""A strategy that traces the program that one core of a TPU slice would run."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from typing import Any

import tensorflow as tf

# TensorFlow has these under private names only.
from ctl.errors import UsageError
from ctl.private.tensorflow import gen_xla_ops, one_device_strategy, resource_variable_ops

_OPERATIONS = {
    tf.VariableAggregation.SUM: tf.distribute.ReduceOp.SUM,
    tf.VariableAggregation.MEAN: tf.distribute.ReduceOp.MEAN,
}
_NESTED = (
    "The step calls strategy.run inside strategy.run, but TPU programs cannot be nested: call it "
    "once, in train_step."
)


@dataclasses.dataclass(frozen=True)
class TracedProgram:
    """The program that one call of `run` would run on the TPU.

    Attributes:
        function: the replica function, compiled by XLA.
        specs: the specs of its arguments.
    """

    function: Any
    specs: list[tf.TensorSpec]


class SliceStrategy(tf.distribute.TPUStrategy):
    """A strategy that traces one of many replicas; its reductions are all-reduces over all.

        strategy = SliceStrategy(8)
        with strategy.scope():
            trainer = ...
        tf.function(trainer.train_step).get_concrete_function(iterator)
        strategy.traced[0].function             # the function that the step passed to strategy.run

    It is a TPUStrategy, so that code which tests for one behaves as on a TPU. As on a TPU, a reduction
    in replica context is one XLA operation, and `replica_id_in_sync_group` is a tensor. The
    variables belong to one replica, on this machine's CPU, where a one-replica program can run.

    Args:
        replicas: the number of cores of the slice.

    Attributes:
        traced: the programs that `run` traced inside a tf.function, in order.
    """

    def __init__(self, replicas: int):
        # Not TPUStrategy.__init__, which connects to a TPU.
        tf.distribute.Strategy.__init__(self, _Extended(self, replicas))
        self.traced: list[TracedProgram] = []

    def run(self, fn: Callable, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Calls a replica function; inside a tf.function, as a program compiled by XLA."""
        del options
        if tf.executing_eagerly():
            return self.extended.call_for_each_replica(fn, args, kwargs)
        if self.extended.in_replica:
            raise UsageError(_NESTED)
        structure = (tuple(args), dict(kwargs or {}))
        values = tf.nest.flatten(structure)
        positions = [i for i, value in enumerate(values) if tf.is_tensor(value)]

        def replica_fn(*tensors: tf.Tensor) -> Any:
            inner = list(values)
            for i, tensor in zip(positions, tensors, strict=True):
                inner[i] = tensor
            inner_args, inner_kwargs = tf.nest.pack_sequence_as(structure, inner)
            with self.extended.replica():
                return fn(*inner_args, **inner_kwargs)

        function = tf.function(replica_fn, jit_compile=True)
        tensors = [values[i] for i in positions]
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        self.traced.append(TracedProgram(function, specs))
        return function(*tensors)


class _Extended(one_device_strategy.OneDeviceExtended):
    """One device that acts as one of several replicas."""

    def __init__(self, container: SliceStrategy, replicas: int):
        super().__init__(container, "/CPU:0")
        self._replicas = replicas
        self.num_hosts = 1
        self.in_replica = False

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._replicas

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        variable = super()._create_variable(next_creator, **kwargs)
        is_per_replica = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        is_aggregated = kwargs.get("aggregation") not in (None, tf.VariableAggregation.NONE)
        is_plain = type(variable) is resource_variable_ops.ResourceVariable
        if is_aggregated and is_plain and not is_per_replica:
            variable.__class__ = AggregatedVariable
        return variable

    @contextlib.contextmanager
    def replica(self) -> Iterator[None]:
        """Enters replica context."""
        outer, self.in_replica = self.in_replica, True
        try:
            with _ReplicaContext(self._container_strategy()):
                yield
        finally:
            self.in_replica = outer

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with self.replica():
            return fn(*args, **kwargs)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        """All-reduces a tensor in replica context; a Python number is the same on all replicas."""
        del destinations, options
        if self._replicas == 1 or not tf.is_tensor(value) or tf.executing_eagerly():
            return value
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if not mean and reduce_op != tf.distribute.ReduceOp.SUM:
            raise UsageError(f"A TPU cannot reduce by {reduce_op}: use SUM or MEAN.")
        total = gen_xla_ops.xla_all_reduce(
            tf.convert_to_tensor(value),  # makes IndexedSlices dense, as XLA requires
            group_assignment=[list(range(self._replicas))],
            reduce_op="Add",
            mode="CrossReplica",
        )
        return total / tf.cast(self._replicas, total.dtype) if mean else total

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        """Makes the dataset of one of the replicas."""
        del options
        return dataset_fn(tf.distribute.InputContext(num_replicas_in_sync=self._replicas))

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        """Splits global batches into per-replica batches."""
        del options
        rows = tf.nest.flatten(dataset.element_spec)[0].shape[0]
        return dataset if rows is None else dataset.rebatch(-(-rows // self._replicas))


class _ReplicaContext(tf.distribute.ReplicaContext):
    """Replica context in which the replica's id is a tensor, since all cores run one program."""

    def __init__(self, strategy: SliceStrategy):
        is_alone = strategy.num_replicas_in_sync == 1 or tf.executing_eagerly()
        replica_id = 0 if is_alone else gen_xla_ops.xla_replica_id()
        super().__init__(strategy, replica_id_in_sync_group=replica_id)

    @property
    def devices(self) -> Any:
        return self.strategy.extended.worker_devices


class AggregatedVariable(resource_variable_ops.ResourceVariable):
    """A variable whose updates in replica context are first all-reduced by its `aggregation`.

    Under a TPUStrategy, tf_keras makes metrics such variables, so each metric update is a
    collective.
    """

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assigns the aggregate of the replicas' values."""
        return super().assign(self._aggregate(value), *args, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds the aggregate of the replicas' values."""
        return super().assign_add(self._aggregate(delta), *args, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Subtracts the aggregate of the replicas' values."""
        return super().assign_sub(self._aggregate(delta), *args, **kwargs)

    def _aggregate(self, value: Any) -> Any:
        context = tf.distribute.get_replica_context()
        is_alone = context is None or context.num_replicas_in_sync == 1
        if is_alone or tf.executing_eagerly() or isinstance(value, int | float):
            return value
        value = tf.convert_to_tensor(value, self.dtype)
        operation = _OPERATIONS.get(self.aggregation)
        if operation is None:
            return _broadcast_from_first_replica(context, value)
        return _all_reduce(context, operation, value)


def _broadcast_from_first_replica(context: Any, value: tf.Tensor) -> tf.Tensor:
    """Returns the first replica's value, as a sum to which the other replicas add zeros.

    The sum of the bit patterns is exact. XLA all-reduces no 64-bit numbers, so each is sent as two
    32-bit ones.
    """
    is_64_bit = value.dtype.size == 8
    bits = tf.bitcast(value, tf.int32) if is_64_bit else value
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    contribution = tf.where(is_first, bits, tf.zeros_like(bits))
    bits = _all_reduce(context, tf.distribute.ReduceOp.SUM, contribution)
    return tf.bitcast(bits, value.dtype) if is_64_bit else bits


def _all_reduce(context: Any, operation: tf.distribute.ReduceOp, value: tf.Tensor) -> tf.Tensor:
    def reduce(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
        return strategy.extended.reduce_to(operation, value, destinations=value)

    return context.merge_call(reduce, args=(value,))
