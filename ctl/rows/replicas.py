"""The replicas of a step: the number of this one, its slot of a table, and what they assign together.

To assign a mirrored variable, `tf.distribute` merges the replicas: one function runs for all of them.
A program of XLA is compiled for one device, so it cannot contain a merge. In a program of XLA for GPUs
each replica assigns its own copies instead. The rest of ctl calls `merge` and `run`, which do either.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import threading
from typing import Any

import tensorflow as tf

from ctl.private.tensorflow import distribute_lib
from ctl.rows import packs

# Thread-local, because tf.distribute traces each replica in its own thread.
_THREAD = threading.local()
_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


def are_merged() -> bool:
    """Returns whether `tf.distribute` merges the replicas to assign a mirrored variable here."""
    return not tf.__internal__.distribute.strategy_supports_no_merge_call()


def merge(function: Callable[..., Any], *values: Any) -> None:
    """Calls a function that assigns mirrored variables alike; call it in a replica context.

    Args:
        function: (strategy, *values) -> None. It is called once for all replicas, in a cross-replica
            context; in a program of XLA for GPUs, on each replica, whose own copies it assigns.
        *values: tensors, or nested structures of them.
    """
    context = tf.distribute.get_replica_context()
    if are_merged():
        context.merge_call(function, args=values)
        return
    outer, _THREAD.alike = getattr(_THREAD, "alike", False), True
    try:
        function(context.strategy, *values)
    finally:
        _THREAD.alike = outer


def run(strategy: tf.distribute.Strategy, function: Callable[..., None], args: Any) -> None:
    """Calls a function on each replica; call it inside of the function of `merge`."""
    if tf.distribute.in_cross_replica_context():
        strategy.run(function, args=args)
    else:
        function(*args)


def first(strategy: tf.distribute.Strategy, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the copies of the first local replica of values that are the same on every replica."""
    return [strategy.experimental_local_results(value)[0] for value in values]


def arguments() -> tuple[tf.Tensor, ...]:
    """Returns what `numbered` gets in a program of XLA: the number of this replica, if there are more.

    With a constant instead of an argument, each replica would have another program.
    """
    is_alone = tf.distribute.get_replica_context().num_replicas_in_sync == 1
    return () if is_alone else (number(),)


@contextlib.contextmanager
def numbered(number: tf.Tensor | None = None) -> Iterator[None]:
    """Sets the number of this replica within a `with` block that is traced into a program."""
    outer, _THREAD.number = getattr(_THREAD, "number", None), number
    try:
        yield
    finally:
        _THREAD.number = outer


def number() -> tf.Tensor:
    """Returns the number of this replica in the global batch, int32; call it in a replica context."""
    own = getattr(_THREAD, "number", None)
    return tf.distribute.get_replica_context().replica_id_in_sync_group if own is None else own


def local_number() -> int | None:
    """Returns the number of this replica in its process; None in code that runs once for all replicas.

    The code that updates a variable runs for one replica after the other, outside of their contexts.
    """
    context = tf.distribute.get_replica_context()
    number: Any = distribute_lib.get_update_replica_id() if context is None else context._replica_id
    # With one replica, it may be a device or a variable; on a TPU one trace serves all replicas.
    return 0 if number is not None and not isinstance(number, int) else number


def own_slot(value: tf.Tensor) -> tf.Tensor:
    """Returns [replicas, ...] with a value in the slot of this replica, and zeros in the others.

    The SUM of these tables adds zeros to one number, which is exact in any order.
    """
    # Not tf.pad, whose paddings must be constants in XLA.
    count = tf.distribute.get_replica_context().num_replicas_in_sync
    is_own = tf.reshape(tf.range(count) == number(), [-1, *[1] * value.shape.rank])
    return tf.where(is_own, value, tf.zeros_like(value))


def aggregate(original: Any, value: Any, aggregation: Any, destinations: Any) -> Any:
    """Returns what each replica assigns to its own copy of a variable, as TensorFlow's function.

    TensorFlow calls it only where it does not merge the replicas, but would merge them to send the value
    of the first one, which fails.
    """
    if aggregation != _FIRST or not tf.is_tensor(value):
        return original(value, aggregation, destinations)
    if getattr(_THREAD, "alike", False):
        return value
    context, sent = tf.distribute.get_replica_context(), value
    if value.dtype == tf.bool:  # has no sum
        sent = tf.cast(value, tf.int32)
    sent = tf.where(number() == 0, sent, tf.zeros_like(sent))
    return tf.cast(context.all_reduce(tf.distribute.ReduceOp.SUM, sent), value.dtype)


def sum_over_replicas(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors over the replicas, in packs of one dtype; call it in a replica context."""
    if are_merged():
        return _sum(values)
    # TensorFlow gathers the rows of sparse gradients, and XLA has no such collective.
    parts: list[tf.Tensor] = []
    for value in values:
        is_sparse = isinstance(value, tf.IndexedSlices)
        table = (value.values, value.indices) if is_sparse else ()
        parts += map(own_slot, table) if is_sparse else [value]
    sums = iter(_sum(parts))

    def gathered(slices: tf.IndexedSlices) -> tf.IndexedSlices:
        rows = [tf.reshape(table, [-1, *table.shape[2:]]) for table in (next(sums), next(sums))]
        return tf.IndexedSlices(*rows, slices.dense_shape)

    return [gathered(v) if isinstance(v, tf.IndexedSlices) else next(sums) for v in values]


def _sum(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    context = tf.distribute.get_replica_context()
    sums = list(values)
    # TensorFlow concatenates the tensors of one call, so they must have the same dtype.
    for dtype in dict.fromkeys(value.dtype for value in values):
        places = [i for i, value in enumerate(values) if value.dtype == dtype]
        same = [values[i] for i in places]
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, same, packs.options_for(same))
        for i, value in zip(places, reduced, strict=True):
            sums[i] = value
    return sums


def replica_context() -> tf.distribute.ReplicaContext:
    """Returns the context of this replica; None if it is the only one, and while a model is built."""
    context = tf.distribute.get_replica_context()
    return None if context is None or context.num_replicas_in_sync == 1 else context
