"""Variables whose value differs between replicas, and whose checkpoint has the values of all."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Elements of the widest vector instruction that TensorFlow's kernels use: 512 bits of float32. A kernel
# computes the elements of complete vectors and the rest by different code, whose rounding may differ in
# approximations such as rsqrt. So slices contain complete vectors, and the rest is on every replica.
_VECTOR = 16


class _GatheredVariable(tf.__internal__.tracking.Trackable):
    """A variable with a part on each replica, which is saved and restored as one tensor.

    A subclass defines `read_value`, `assign`, `dtype` and `_shared_name`.
    """

    trainable = False

    def numpy(self) -> Any:
        """Returns the complete tensor as an array; every process must call it."""
        return self.read_value().numpy()

    def _should_act_as_resource_variable(self) -> None:
        """Makes TensorFlow store the name of the variable in checkpoints."""

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored["VARIABLE_VALUE"])

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """Copies the value for a checkpoint that a thread writes."""
        value = self.read_value()
        if self not in object_map:
            with tf.device("CPU:0"), tf.init_scope():
                object_map[self] = tf.Variable(
                    tf.zeros(value.shape, self.dtype), name=self._shared_name, trainable=False
                )
        object_map[self].assign(value)


class ReplicaValues(_GatheredVariable):
    """A variable with one value per replica, saved as one [replicas, ...] tensor.

    If it is restored on the same number of replicas, each gets its own value back, bit for bit. On a
    different number N, each gets the sum of all values divided by N, which keeps the sum over replicas.

    TensorFlow's ON_READ variables with the aggregation SUM save only the sum.

    The variable is zero on every replica at first. Create it in the strategy's scope.

    Args:
        reference: a variable that has the shape and the dtype of one replica's value.
        name: the name of the variable.
        strategy: the strategy of the variable.

    Attributes:
        shape: [None, ...], because a checkpoint may have the values of any number of replicas.
        dtype: the dtype of the values.
        local: the distributed variable; in a replica context, this replica's value.
    """

    synchronization = tf.VariableSynchronization.ON_READ
    aggregation = tf.VariableAggregation.SUM

    def __init__(self, reference: tf.Variable, name: str, strategy: tf.distribute.Strategy):
        # The dtype of a variable in mixed precision is `true_dtype`.
        dtype = getattr(reference, "true_dtype", reference.dtype)
        with strategy.extended.colocate_vars_with(reference):
            self.local = tf.Variable(
                tf.zeros(reference.shape, dtype),
                trainable=False,
                name=name,
                synchronization=self.synchronization,
                aggregation=self.aggregation,
            )
        self.name, self.dtype = self.local.name, dtype
        self.shape = tf.TensorShape([None, *reference.shape])
        self._shared_name = name
        self._strategy = strategy
        self._gather = make_gather(strategy)

    def read_value(self) -> tf.Tensor:
        """Collective: returns the values of all replicas, [replicas, ...], on the CPU."""
        with tf.device("CPU:0"):
            return _read_all(self._components(), self._strategy, self._gather)

    def assign(self, value: Any) -> None:
        """Assigns each replica its value.

        Args:
            value: [n, ...], the values of n replicas. If n is not the number of replicas, each replica
                gets an equal part of their sum.
        """
        value = tf.convert_to_tensor(value)
        replicas = self._strategy.num_replicas_in_sync
        if value.shape[0] != replicas:
            value = tf.repeat(tf.reduce_sum(value, axis=0, keepdims=True) / replicas, replicas, 0)
        components = self._components()
        for local, component in enumerate(components):
            replica = local
            if len(components) < replicas:  # the others are in other processes
                replica = self._strategy.extended._get_replica_id_in_sync_group(local)
            component.assign(value[replica])

    def _components(self) -> Any:
        return getattr(self.local, "values", [self.local])

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        values = self.read_value()
        # Every worker must take part in the gather, but only the chief's files are kept.
        return {
            "VARIABLE_VALUE": values if self._strategy.extended.should_checkpoint else values[:0]
        }


class SliceLayout:
    """The elements of a flattened variable that each replica updates.

    The elements of complete vectors are split over the replicas, in order; zeros fill the last slices.
    Every replica also updates the rest, fewer than 16 elements, so it has the same bits everywhere:

        variable of 70 elements on 2 replicas:  0..31 and 64..69  |  32..63 and 64..69

    Args:
        shape: the static shape of the variable.
        replicas: the number of replicas.

    Attributes:
        body: the elements of a slice that no other replica has.
        length: the elements of a slice.
    """

    def __init__(self, shape: Sequence[int], replicas: int):
        self.shape = tf.TensorShape(shape)
        self.replicas = replicas
        size = self.shape.num_elements()
        self._rest = size % _VECTOR
        self._split = size - self._rest  # elements that are split over the replicas
        self.body = -(-self._split // (_VECTOR * replicas)) * _VECTOR
        self.length = self.body + self._rest

    def cut(self, value: Any, replica: Any) -> tf.Tensor:
        """Returns the slice of a replica.

        Args:
            value: a tensor in the shape of the variable.
            replica: the replica's number, an int or a scalar tensor.

        Returns:
            [length] elements.
        """
        flat = tf.reshape(value, [-1])
        start = tf.minimum(tf.cast(replica, tf.int64) * self.body, self._split)  # may exceed int32
        size = tf.minimum(tf.cast(self.body, tf.int64), self._split - start)
        body = tf.pad(tf.slice(flat, [start], [size]), [[0, self.body - size]])
        body = tf.ensure_shape(body, [self.body])
        return tf.concat([body, flat[self._split :]], axis=0) if self._rest else body

    def cut_rows(self, gradient: tf.IndexedSlices, replica: Any) -> tf.IndexedSlices:
        """Returns the slice of a replica of a sparse gradient, with one index per element.

        Args:
            gradient: a gradient with at most one entry per row of the variable.
            replica: the replica's number, an int or a scalar tensor.

        Returns:
            A sparse gradient of [length] elements.
        """
        width = self.shape[1:].num_elements()
        rows = tf.cast(gradient.indices, tf.int64)[:, tf.newaxis]
        places = tf.reshape(rows * width + tf.range(width, dtype=tf.int64), [-1])
        start = tf.cast(replica, tf.int64) * self.body
        is_rest = places >= self._split
        in_body = (places >= start) & (places < start + self.body)
        local = tf.where(is_rest, places - self._split + self.body, places - start)
        chosen = tf.where(is_rest | in_body)[:, 0]
        return tf.IndexedSlices(
            values=tf.gather(tf.reshape(gradient.values, [-1]), chosen),
            indices=tf.gather(local, chosen),
            dense_shape=tf.constant([self.length], tf.int64),
        )

    def join(self, bodies: tf.Tensor, rest: tf.Tensor) -> tf.Tensor:
        """Returns the value of the variable.

        Args:
            bodies: [replicas, body] elements, in the order of the replicas.
            rest: the last elements of any slice.
        """
        flat = tf.reshape(bodies, [-1])[: self._split]
        return tf.reshape(tf.concat([flat, rest], axis=0) if self._rest else flat, self.shape)


class SlicedSlot(_GatheredVariable):
    """A slot variable of which every replica holds its slice, read and assigned as one tensor.

    A checkpoint has the complete tensor under the key of a slot variable that is not sliced, so that any
    number of replicas can restore it.

    Args:
        slices: the distributed variable of [length] elements, one slice for each replica.
        layout: which elements each replica has.
        strategy: the strategy of the variable.
        gather: the result of `make_gather`.

    Attributes:
        name: the name of the slot variable, such as "m/dense/kernel:0".
        shape: the shape of the complete tensor.
        dtype: its dtype.
    """

    synchronization = tf.VariableSynchronization.AUTO
    aggregation = tf.VariableAggregation.NONE

    def __init__(
        self,
        slices: tf.Variable,
        layout: SliceLayout,
        strategy: tf.distribute.Strategy,
        gather: Callable[[Any], Any],
    ):
        self.name, self.dtype, self.shape = slices.name, slices.dtype, layout.shape
        self.slices = slices
        self._layout = layout
        self._distribute_strategy = strategy  # as TensorFlow's variables have it
        self._gather = gather
        self._shared_name = slices._shared_name

    def read_value(self) -> tf.Tensor:
        """Returns the complete tensor on the CPU; every process must call it.

        The GPUs' memory holds at most one more slot while it is gathered between processes.
        """
        layout = self._layout
        with tf.device("CPU:0"):
            slices = _read_all(self.slices.values, self._distribute_strategy, self._gather)
            return layout.join(slices[:, : layout.body], slices[0, layout.body :])

    def assign(self, value: Any) -> None:
        """Assigns every replica its slice of the complete tensor."""
        for local, component in enumerate(self.slices.values):
            replica = self._distribute_strategy.extended._get_replica_id_in_sync_group(local)
            component.assign(self._layout.cut(value, replica))

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)


def make_gather(strategy: tf.distribute.Strategy) -> Callable[[Any], Any]:
    """Returns a function that gathers the [length] slices of all processes to [replicas, length]."""

    @tf.function(autograph=False)
    def gather(slices: Any) -> Any:
        def run(value: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_gather(value[tf.newaxis], axis=0)

        gathered = strategy.run(run, args=(slices,))
        return strategy.experimental_local_results(gathered)[0]

    return gather


def _read_all(
    components: Sequence[Any], strategy: tf.distribute.Strategy, gather: Callable[[Any], Any]
) -> tf.Tensor:
    """Returns the values of all replicas, [replicas, ...]."""
    parts = [tf.identity(component) for component in components]
    if len(parts) == strategy.num_replicas_in_sync:  # all of them are in this process
        return tf.stack(parts)
    values = iter(parts)
    local = strategy.experimental_distribute_values_from_function(lambda _: next(values))
    return tf.identity(gather(local))
