"""Rejects losses in which a row of the batch depends on other rows of its replica or micro-batch.

The ops from the batch to the losses are searched while the step is traced; nothing is added to the
graph. An op that may combine rows is a suspect. The losses are then computed for the first batch with
other rows exchanged, once, before the first step: if the loss of a row changes, it is rejected.
"""

from collections.abc import Callable, Iterator
import contextlib
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.replica.arithmetic.row_mask import Examples
from ctl.replica.checks import random_search, trace_comparison
from ctl.replica.checks.coupling_probe import Probe, ProbeError
from ctl.replica.checks.loss_trace import LossTrace, Update, symbolic
from ctl.replica.checks.row_flow import Mixed, RowFlow, outer_tensor
from ctl.replica.checks.row_place import Rows

_LOG = logging.getLogger("ctl")
_ACCEPT = "or accept it with allow_row_coupling=True (runtime.allow_row_coupling)"
_GATHER = "ctl.replica.all_gather(x)"
_REORDERING = ("GatherV2", "ReverseV2", "Roll", "RandomShuffle", "StridedSlice", "GatherNd")
_STATISTICS = ("Sum", "Mean", "Max", "Min", "Prod", "L2Loss", "EuclideanNorm", "FusedBatchNormV3")
ReadBatch = Callable[[], Any]


@contextlib.contextmanager
def search(rows: Examples, replicas: int, read_batch: ReadBatch) -> Iterator[None]:
    """Searches the losses that the code inside the `with` block computes.

    Args:
        rows: the rows of a replica, with a trace; without one nothing is searched.
        replicas: the number of replicas that compute the global batch.
        read_batch: returns the first batch of a replica, like the tensors of the trace.

    Raises:
        UsageError: the loss of a row depends on other rows of the replica, or the replicas compute
            different functions of their rows. The message names the user's line of code.
    """
    trace = rows.trace
    if trace is None or rows.graph is None:
        yield
        return
    # On several replicas the first position is computed from the rows of all.
    trace.constants = {
        id(tensor): np.zeros([], tensor.dtype.as_numpy_dtype)
        for tensor in symbolic([rows.first_row, rows.step])
    }
    with trace.record_collectives():
        yield
    # The graph keeps the traces, because it also keeps their tensors.
    traces = [*getattr(rows.graph, "_ctl_loss_traces", ()), trace]
    rows.graph._ctl_loss_traces = traces
    if len(traces) > 1:  # another replica of this process, in the same graph
        difference = trace_comparison.compare_replicas(traces[0], trace, len(traces) - 1)
        _check_equal(difference, "replicas")
        return
    _check_equal(trace_comparison.compare_micro_batches(trace), "micro-batches")
    for update in trace.updates:
        _check_update(trace, update, replicas, rows.parts, read_batch)


def _check_update(
    trace: LossTrace, update: Update, replicas: int, parts: int, read_batch: ReadBatch
) -> None:
    batch = {id(x): Rows(0) for x in trace.batch}
    clean = [id(value.output) for value in trace.global_values]
    count = static_count(trace.batch[0])

    # The undivided batch, up to what `preprocess` and `sample_weight` returned.
    prepared = RowFlow(batch, count=count, clean=clean)
    _check(trace, update, prepared, update.inputs, replicas > 1, count, read_batch)

    part = update.micro_batches[0]
    leading = {id(x): Rows(0) for x in part.rows if x.shape.rank}
    rows = part.size if isinstance(part.size, int) else None

    def resolve(tensor: tf.Tensor) -> tf.Tensor | None:
        alias = update.aliases.get(id(tensor))
        return outer_tensor(tensor) if alias is None else alias

    losses = RowFlow(
        {**batch, **leading},
        count=rows,
        clean=clean,
        resolve=resolve,
    )
    _check(
        trace,
        update,
        losses,
        [part.losses],
        replicas * parts > 1,
        rows,
        read_batch,
    )


def _check(
    trace: LossTrace, update: Update, flow: RowFlow, values: list[tf.Tensor], split: bool,
    count: int | None, read_batch: ReadBatch,
) -> None:  # fmt: skip
    """Raises a UsageError, or warns if the batch is not split, if the rows affect each other."""
    states = [(value, flow.state(value)) for value in values]
    suspects = [(value, state.op) for value, state in states if isinstance(state, Mixed)]
    if not suspects:
        return
    probe = Probe(
        [value for value, _ in suspects],
        trace.batch,
        constants=trace.constants,
        aliases=update.aliases,
        global_values=trace.global_values,
        statistics=flow.statistics,
    )
    unknown = ""
    try:
        if not _run(probe, trace, read_batch, count):
            return
    except ProbeError as error:
        unknown = f" (this could not be computed for a batch: {error})"
    op = suspects[0][1]
    line = (
        f"{random_search.place(op)} combines rows of the same replica or micro-batch ({op.type}), so "
        f"the loss of a row depends on how the batch is split{unknown}: {_suggestion(op)}, {_ACCEPT}."
    )
    if split:
        raise UsageError(line)
    # All rows are those of one replica: the update is right, until the config splits the batch.
    _LOG.warning("%s It is right as long as one replica computes the batch at once.", line)


def _run(probe: Probe, trace: LossTrace, read_batch: ReadBatch, count: int | None) -> bool:
    with tf.init_scope():
        try:
            batch, mask = read_batch()
        # ValueError: distributed data of the user cannot be read while a replica is traced.
        except (tf.errors.OpError, StopIteration, ValueError) as error:
            raise ProbeError("there is no batch") from error
        values = [x for x in tf.nest.flatten((batch, mask)) if x is not None]
        if len(values) != len(trace.batch):
            raise ProbeError("the batches of the data are others")
        values = [tf.cast(v, x.dtype) for v, x in zip(values, trace.batch, strict=True)]
        rows = values[0].shape[0] if mask is None else int(tf.math.count_nonzero(mask))
        rows = min(rows, rows if count is None else count)
        if rows < 2:
            raise ProbeError("it has one row")
        return probe.depends_on_other_rows(values, rows)


def _suggestion(op: Any) -> str:
    if op.type in _REORDERING:
        return (
            f"select from {_GATHER}, the rows of the global batch, by ctl.replica.positions(x) or "
            "ctl.random.permutation_of_batch()"
        )
    if op.type in _STATISTICS:
        return (
            f"compute it of {_GATHER}, the rows of the global batch, or use "
            "ctl.SyncBatchNormalization"
        )
    return (
        f"compare with {_GATHER}, the rows of the global batch, where ctl.replica.positions(x) are the "
        "replica's own"
    )


def _check_equal(difference: trace_comparison.Difference | None, parts: str) -> None:
    if difference is None:
        return
    one, two = difference.values
    raise UsageError(
        f"{random_search.place(difference.op)} is {one} in one of the {parts} and {two} in another: "
        "code in Python, such as a counter, runs once for each of them, while the step is traced. Use "
        f"self.global_step, or a tf.Variable, {_ACCEPT}."
    )


def static_count(tensor: tf.Tensor) -> int | None:
    """Returns the number of rows of a tensor, if it is known while the step is traced."""
    return tensor.shape[0] if tensor.shape.rank else None


def make_trace(inputs: Any, *, allow: bool) -> LossTrace | None:
    """Returns the trace of a step that computes a replica's batch; None if it is not searched.

    Args:
        inputs: the tensors of the batch, and the mask.
        allow: whether rows may depend on each other.
    """
    tensors = symbolic(inputs)
    return None if allow or not tensors else LossTrace(tensors)
