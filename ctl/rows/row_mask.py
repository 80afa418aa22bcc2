"""Defines which rows of a replica's batch exist, and their position in the global batch.

The step enters `examples(...)` around the forward and the backward pass of one replica. Layers and
losses read it by `current_mask()` or `current()`. The state is thread-local, because
`tf.distribute.MirroredStrategy` traces each replica in its own thread.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import threading
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.rows import replicas
from ctl.rows.trace import Trace

_THREAD = threading.local()
# The fields of `Rows` that hold for all micro-batches of a step.
_OF_THE_STEP = (
    "seed", "allow_unkeyed", "single", "trace", "compiled", "kernels", "normalizes_micro_batches"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one micro-batch on one replica, which layers and losses read.

    Attributes:
        row_mask: [rows] tensor, 1 for a row that exists and 0 for padding; None if all rows exist.
        first_row: scalar int64, the position of the first row in the global batch.
        step: scalar int64, the global step.
        calls: number of draws so far of each random layer, by the key of the layer.
        count: number of rows, including padding: an int if it is static; None if it is not known.
        isolated: why the code inside cannot read the rows of other replicas and micro-batches, as the
            end of a message; empty if it can.
        seed: the seed of the run.
        allow_unkeyed: whether layers may draw numbers that are not keyed by rows.
        earlier: in an evaluation, returns the number of rows in the earlier global batches; None in
            training.
        graph: the graph that the rows are computed in; None in eager execution.
        micro_batches: the number of micro-batches that these rows are computed in.
        single: whether the static shapes of a micro-batch of the replica tell that it has one row.
        compiled: whether XLA compiles the computation of the rows.
        kernels: whether layers may use a kernel of the device that rounds in another way.
        normalizes_micro_batches: whether batch normalization may use the rows of one micro-batch.
        update: the part of an update that is computed, in which there are no rows; "" for all else.
        trace: what layers, losses and updates report while the step is traced.
    """

    row_mask: tf.Tensor | None = None
    first_row: tf.Tensor | int = 0
    step: tf.Tensor | int = 0
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    count: int | tf.Tensor | None = None
    isolated: str = ""
    seed: int = 0
    allow_unkeyed: bool = False
    earlier: Callable[[], tf.Tensor] | None = None
    graph: Any = None
    micro_batches: int = 1
    single: bool = False
    compiled: bool = False
    kernels: bool = True
    normalizes_micro_batches: bool = False
    update: str = ""
    trace: Trace = dataclasses.field(default_factory=Trace)


@contextlib.contextmanager
def examples(row_mask: tf.Tensor | None = None, **fields: Any) -> Iterator[Rows]:
    """Sets the rows that the code inside the `with` block computes.

    Enclose both the forward pass and `tape.gradient`: layers read the rows in both.

    Args:
        row_mask: [rows] tensor, 1 for a row that exists and 0 for padding; None if all rows exist.
        **fields: further fields of `Rows`. By default, the ones that hold for the complete step
            are those of the enclosing rows.

    Yields:
        The `Rows` that `current()` returns inside the block.
    """
    outer = _enclosing()
    if outer:
        fields = {name: getattr(outer, name) for name in _OF_THE_STEP} | fields
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    rows = Rows(row_mask, **fields, graph=graph)
    is_single = isinstance(rows.count, int) and rows.count // rows.micro_batches < 2
    with _set(dataclasses.replace(rows, single=rows.single or is_single)) as rows:
        yield rows


def replay(rows: Rows, calls: dict[str, int]) -> contextlib.AbstractContextManager[Rows]:
    """Sets the rows of an earlier pass again.

    Args:
        rows: the rows of that pass.
        calls: number of draws of each random layer when it began.
    """
    return _set(dataclasses.replace(rows, calls=calls))


@contextlib.contextmanager
def of_update(name: str) -> Iterator[None]:
    """Sets what is known where all values are those of the global batch, such as in an optimizer.

    There are no rows, so that a random draw is the same on every replica. TensorFlow merges the replicas
    to update variables: their optimizer may run in other threads, which read it from the graph.

    Args:
        name: identifies the part of the step, by which its draws are keyed.
    """
    outer = _enclosing()
    if (
        outer is None
    ):  # in a step that ctl does not run, whose number is not known: draws are errors
        yield
        return
    rows = dataclasses.replace(
        outer, row_mask=None, first_row=0, count=None, calls={}, update=name,
        isolated="but an update has no rows: do it in the forward pass.",
    )  # fmt: skip
    graph: tf.Graph = tf.compat.v1.get_default_graph()
    updates = graph._ctl_updates = getattr(graph, "_ctl_updates", {})
    number = replicas.local_number()
    updates[number] = rows
    try:
        with _set(rows):
            yield
    finally:
        del updates[number]


@contextlib.contextmanager
def _set(rows: Rows) -> Iterator[Rows]:
    # Restored afterwards, because the micro-batches of a step nest in the step.
    outer, _THREAD.examples = getattr(_THREAD, "examples", None), rows
    try:
        yield rows
    finally:
        _THREAD.examples = outer


def _enclosing() -> Rows | None:
    rows: Rows | None = getattr(_THREAD, "examples", None)
    if rows is None:
        updates = (getattr(graph, "_ctl_updates", None) for graph in enclosing_graphs())
        current: dict[int | None, Rows] = next(filter(None, updates), {})
        rows = current.get(replicas.local_number(), current.get(0))
    return rows


def current() -> Rows | None:
    """Returns the rows that the enclosing step computes, or None outside of a step.

    Raises:
        UsageError: the rows belong to a graph other than the one that is being traced. This happens
            in a user's own `tf.function` that was traced in an earlier step.
    """
    rows = _enclosing()
    if rows is not None:
        for value in (rows.row_mask, rows.first_row, rows.step, rows.count):
            _check_graph(value)
    return rows


def in_step() -> bool:
    """Returns whether the current graph computes rows of a step, or is nested in one that does."""
    rows = _enclosing()
    if rows is None:
        return False
    if rows.graph is None:
        return True
    return not tf.executing_eagerly() and any(graph is rows.graph for graph in enclosing_graphs())


def enclosing_graphs() -> Iterator[tf.Graph]:
    """Yields the graph that is being traced and those that it is nested in, from inside out."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def current_mask() -> tf.Tensor | None:
    """Returns the [rows] mask of the rows that exist; None if all exist, and outside of a step.

    mask = ctl.replica.present()
    count = len(x) if mask is None else tf.reduce_sum(mask)    # rows that are no padding
    """
    rows = current()
    return None if rows is None else rows.row_mask


def require_all(reader: str) -> None:
    """Raises UsageError if the code inside cannot read the other rows of the global batch.

    Args:
        reader: the layer or function that reads them, as the subject of the message.
    """
    rows = current()
    if rows is not None and rows.isolated:
        rows.trace.refused.append(reader)
        raise UsageError(f"{reader} reads the rows of the complete global batch, {rows.isolated}")


def record_global(tensor: tf.Tensor) -> tf.Tensor:
    """Records a tensor of the only replica's rows as a value of the global batch, and returns it."""
    rows = _enclosing()
    if rows is None:
        return tensor
    output = tf.identity(tensor)  # the tensor itself remains one of this replica's rows
    rows.trace.add_global(output, tensor)
    return output


def row_range(count: int | tf.Tensor) -> tuple[tf.Tensor, int | tf.Tensor]:
    """Returns where this replica's rows begin in the global batch, and its number of rows.

    Outside of a replica context, such as while a model is built, all rows are those of one replica.

    Args:
        count: number of rows of this replica. A Python int means that all replicas have the same
            number; a tensor is known only when the step runs, and is shared by an all-reduce.

    Returns:
        The position of the first row, int32, and the number of rows of all replicas: an int if `count`
        is one.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        return tf.constant(0), count
    replica, total = replicas.number(), context.num_replicas_in_sync
    # Static shapes are equal on all replicas, so the position needs no communication.
    if isinstance(count, int) or total == 1:
        return replica * count, total * count
    own_count = tf.one_hot(replica, total, dtype=tf.int64) * tf.cast(count, tf.int64)
    counts = tf.cast(context.all_reduce(tf.distribute.ReduceOp.SUM, own_count), tf.int32)
    return tf.cumsum(counts, exclusive=True)[replica], tf.reduce_sum(counts)


def fill_rows(shape: Any, per_row: int | None) -> Any:
    """Replaces None at the beginning of a shape by the number of entries of this replica's rows.

    Args:
        shape: a shape, or a tensor, which is returned unchanged.
        per_row: the number of consecutive entries of each row; 1 by default.

    Raises:
        UsageError: the shape begins with None outside of a step.
    """
    if tf.is_tensor(shape) or not len(shape) or shape[0] is not None:
        return shape
    rows = current()
    if rows is None or rows.count is None:
        raise UsageError(
            "None in the shape of a random draw stands for the rows of a step: give a number."
        )
    return [rows.count * (per_row or 1), *shape[1:]]


def _check_graph(value: object) -> None:
    if not tf.is_tensor(value) or not hasattr(value, "graph"):  # a number or an eager tensor
        return
    # Outer graphs count: tf.cond and compiled functions capture tensors of the step.
    if any(graph is value.graph for graph in enclosing_graphs()):
        return
    raise UsageError(
        "The rows of the current step were read from a function that was traced outside of it: "
        "remove your own @tf.function (or recompute_grad) from the model, ctl traces the step."
    )
