"""Which rows of this replica's batch are present, and where they stand in the global batch.

The step enters `examples(...)` inside the replica function, around the forward pass and the backward
pass; layers and losses ask `present()` or `current()`. The state is thread-local, because
`tf.distribute.MirroredStrategy` traces each replica in a thread of its own.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import threading

import tensorflow as tf

from ctl.errors import UsageError

_THREAD = threading.local()


@dataclasses.dataclass(frozen=True)
class Examples:
    """The rows that one replica holds of one micro-batch.

    Attributes:
        present: [rows] tensor, 1 for a row that exists and 0 for padding; None when all exist.
        first_row: scalar int64, the position in the global batch of this batch's first row.
        step: scalar int64, the global step that the batch belongs to.
        calls: how often each random layer has drawn so far for these rows.
    """

    present: tf.Tensor | None
    first_row: tf.Tensor | int
    step: tf.Tensor | int
    calls: dict[str, int] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def examples(
    present: tf.Tensor | None = None,
    *,
    first_row: tf.Tensor | int = 0,
    step: tf.Tensor | int = 0,
    calls: dict[str, int] | None = None,
) -> Iterator[Examples]:
    """Says which rows the code inside the `with` block works on.

    Enclose the forward pass and `tape.gradient` alike: layers read it in both.

    Args:
        present: [rows] tensor, 1 for a row that exists and 0 for padding; None when all exist.
        first_row: the position in the global batch of this batch's first row.
        step: the global step that the batch belongs to.
        calls: how often each random layer has drawn for these rows before, in the same step.

    Yields:
        The `Examples` that `current()` returns inside.
    """
    outer = getattr(_THREAD, "examples", None)
    _THREAD.examples = Examples(present, first_row, step, {} if calls is None else calls)
    try:
        yield _THREAD.examples
    finally:
        _THREAD.examples = outer


def current() -> Examples | None:
    """Returns the rows that the enclosing step works on, or None outside of any step.

    Raises:
        UsageError: if they belong to another graph than the one being traced, as happens in a
            function of a person's own that was traced in an earlier step.
    """
    found: Examples | None = getattr(_THREAD, "examples", None)
    if found is not None:
        for value in (found.present, found.first_row, found.step):
            _check_graph(value)
    return found


def present() -> tf.Tensor | None:
    """Returns the [rows] mask of the rows that exist, or None when all do (or outside a step)."""
    found = current()
    return None if found is None else found.present


def first_row(count: int | tf.Tensor) -> tf.Tensor:
    """Where this replica's rows begin in the global batch; call it in a replica context.

    Args:
        count: how many rows this replica holds, as a Python int where all hold equally many.
            Counts that are known only when the step runs are shared among the replicas first.

    Returns:
        A scalar int64.
    """
    context = tf.distribute.get_replica_context()
    replica, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    if isinstance(count, int) or replicas == 1:
        return tf.cast(replica, tf.int64) * tf.cast(count, tf.int64)
    mine = tf.one_hot(replica, replicas, dtype=tf.int64) * tf.cast(count, tf.int64)
    counts = context.all_reduce(tf.distribute.ReduceOp.SUM, mine)
    return tf.cumsum(counts, exclusive=True)[replica]


def _check_graph(value: object) -> None:
    if not tf.is_tensor(value) or not hasattr(value, "graph"):  # a number or an eager tensor
        return
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if value.graph is graph:
            return
        graph = getattr(graph, "outer_graph", None)
    raise UsageError(
        "The rows of the current step were read from a function that was traced outside of it: "
        "remove your own @tf.function (or recompute_grad) from inside the model, ctl traces the step."
    )
