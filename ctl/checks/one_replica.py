"""Compares the losses and gradients of a step with those of one replica that computes all rows.

Where something is found that may make the update depend on the split, the code of the step is traced
again, in no strategy and without micro-batches. The ops of all replicas are copied into another graph,
in which collectives are sums and concatenations. For the same rows, both must compute the same losses,
and gradients with the same sum.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import logging
import os
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl.checks import loss_trace
from ctl.checks.graph_copier import (
    FAILURES,
    LATE,
    Computation,
    CopiedTrace,
    GraphCopier,
    ProbeError,
    has_mask,
)
from ctl.checks.read_batches import ReadBatch
from ctl.checks.row_flow import is_statistics
from ctl.checks.row_probe import differ
from ctl.checks.searched_trace import SearchedTrace, Suspect
from ctl.checks.suspects import (
    assigned,
    caller_of,
    conditions_of,
    is_known,
    losses_of,
    updated_values,
    values_of,
)
from ctl.data.autograph import traced
from ctl.data.source import Batch
from ctl.graphs.dataflow import ancestors
from ctl.graphs.places import place_of
from ctl.rows import row_mask
from ctl.rows.row_mask import Rows
from ctl.rows.trace import GlobalValue, Trace, symbolic

_LOG = logging.getLogger("ctl")
_MOST_REPLICAS = 8  # whose losses are computed together
_MOMENTS = os.path.join("ctl", "rows", "moments.py")
Compute = Callable[[Batch, int], Any]


def check(
    searches: Sequence[SearchedTrace], rows: Rows, compute: Compute, suspects: Sequence[Suspect],
    counted: Suspect | None = None,
) -> None:  # fmt: skip
    """Raises a UsageError if one replica with all rows would compute another update.

    Args:
        searches: the traces of the replicas of this process.
        rows: the rows of one of them.
        compute: what was traced, as a function of a batch and of the number of replicas that it sees.
        suspects: what may be the cause; the message names the first.
        counted: what may use the number of replicas.
    """
    first = searches[0]
    if not first.is_split or rows.allow_unkeyed or rows.normalizes_micro_batches:
        return
    counts = _CountComparison(searches[0], rows, compute).finds
    if first.replicas > _MOST_REPLICAS:  # each is a copy of the forward and the backward pass
        for suspect in [each for each in suspects if each.is_seen][:1]:
            _LOG.warning(
                "%s perhaps %s, which is compared for at most %s replicas, and not for %s: `ctl check` "
                "measures whether the update depends on how the batch is split.",
                suspect.place, suspect.use, _MOST_REPLICAS, first.replicas,
            )  # fmt: skip
        if counted:
            first.examine(counts, *counted[:-1], warns=True)
        return
    suspects = [*suspects, *([counted] if counted else [])]
    if not suspects:
        return
    comparison = _Comparison(searches, rows, compute)

    def finds(batches: Sequence[ReadBatch]) -> bool | str | Suspect:
        try:
            return comparison.finds(batches)
        except (ProbeError, *FAILURES):  # the code may require the number of rows of a replica
            if counted and counts(batches):
                return counted
            raise

    place, use, fix, is_seen = suspects[0]
    first.examine(finds, place, use, fix, warns=is_seen)


def retrace(
    rows: Rows, batch: Batch, compute: Compute, *, count: int, parts: int, replicas: int = 1
) -> Trace:
    """Traces a step again, in no strategy.

    Args:
        rows: the rows of a replica that has traced it.
        batch: the rows of the only replica.
        compute: what was traced, as a function of a batch and of the number of replicas that it sees.
        count: the number of rows.
        parts: the number of micro-batches.
        replicas: the number of replicas that the code sees.

    Raises:
        ProbeError: the step cannot be traced with this number of rows.
    """
    traces: list[Trace] = []

    def step(batch: Batch) -> None:
        traces.append(trace := Trace(batch, losses_only=True, replicas=replicas))
        again = dataclasses.replace(
            rows, row_mask=None, first_row=tf.zeros([], tf.int64), step=0, count=count,
            micro_batches=parts, graph=tf.compat.v1.get_default_graph(), single=False, trace=trace,
        )  # fmt: skip
        trace.positions.append(again.first_row)
        with row_mask.replay(again, {}), trace.record_collectives():
            compute(batch, replicas)

    def run() -> None:
        traced(step).get_concrete_function(batch)

    try:
        with tf.init_scope(), futures.ThreadPoolExecutor(1) as thread:  # in no strategy
            thread.submit(run).result()
    # The code may require the number of rows that it has, or fail once the losses are known.
    except Exception as error:
        updates = [each for trace in traces for each in trace.updates if each.micro_batches]
        if len(updates) < len(rows.trace.updates):
            reason = f"the step cannot be traced with {count} rows ({type(error).__name__})"
            raise ProbeError(reason) from error
    if rows.trace.call.get("replica_count", {}).keys() - traces[0].call.get("replica_count", {}):
        raise ProbeError("the code keeps what it has computed")
    return traces[0]


def _retrace(
    searched: SearchedTrace, rows: Rows, compute: Compute, values: Sequence[Any], *, parts: int,
    replicas: int,
) -> Trace:  # fmt: skip
    """Traces the step of one replica for rows without padding, as the code of some replicas."""
    inputs = searched.trace.inputs
    structure = inputs[0] if isinstance(inputs, tuple) else inputs
    batch = tf.nest.pack_sequence_as(structure, [tf.constant(x) for x in values])
    return retrace(rows, batch, compute, count=len(values[0]), parts=parts, replicas=replicas)


class _CountComparison:
    """Computes the losses and gradients of a replica's rows with two numbers of replicas.

    Args:
        searched: the trace of a replica.
        rows: its rows.
        compute: what was traced, as a function of a batch and of the number of replicas that it sees.
    """

    def __init__(self, searched: SearchedTrace, rows: Rows, compute: Compute):
        self._searched, self._rows, self._compute = searched, rows, compute

    def finds(self, batches: Sequence[ReadBatch]) -> bool:
        """Returns whether they differ for the first batch."""
        searched, numbers = self._searched, (self._searched.replicas, 1)
        values = [x.numpy() for x in searched.read(batches[0])[0]]
        values = values[: len(values) - has_mask(searched.trace)]
        results: list[_Results] = []
        for number in numbers:
            trace = _retrace(
                searched, self._rows, self._compute, values, parts=searched.micro_batches,
                replicas=number,
            )  # fmt: skip
            ids = {id(x) for x in ancestors(*updated_values(trace))}
            values_of_all = [x for x in trace.global_values if id(x.output) in ids]
            if not all(is_known(x) for x in values_of_all):
                raise ProbeError("it may divide what all replicas have summed")
            computation = Computation(functools.partial(_compute, _copied(trace, {})))
            results.append(computation(values, results[0].scales if results else []))
        return bool(differ(results[0].values, results[1].values, ..., finite=True))


def _compute(
    source: CopiedTrace, batch: Sequence[tf.Tensor], scales: Sequence[tf.Tensor]
) -> "_Results":
    """Computes the results of one replica, with scales of other results if there are any."""
    copier = GraphCopier(source, source.known(batch))
    return _results([copier], [source.trace], None, scales or None)


class _Comparison:
    """Computes the losses and gradients of all replicas, and those of one with the same rows.

    Args:
        searches: the traces of the replicas of this process.
        rows: the rows of one of them.
        compute: what was traced, as a function of a batch and of the number of replicas that it sees.
    """

    def __init__(self, searches: Sequence[SearchedTrace], rows: Rows, compute: Compute):
        self._searches, self._rows, self._compute = searches, rows, compute
        # Replicas of other processes compute the same function, with other numbers.
        self._local = {each.number: each for each in searches}
        every = [self._local.get(i, searches[0]) for i in range(searches[0].replicas)]
        self._traces = [each.trace for each in every]
        self._sources = [_copied(each.trace, each.first) for each in every]
        self._assigned: list[int] = []  # the number of the variable of each of the last results
        self._one: dict[int, CopiedTrace] = {}  # number of rows -> the trace of one replica
        self._replicas = Computation(self._compute_replicas)
        self._alone = Computation(self._compute_alone)
        self._observed = Computation(self._observe)

    def finds(self, batches: Sequence[ReadBatch]) -> bool | str | Suspect:
        """Returns whether the results differ for some batches, and in what if that is known."""
        parts = self._read(batches)
        is_padded = has_mask(self._traces[0])
        if not is_padded and symbolic(self._traces[0].inputs)[0].shape[0] is None:
            parts[-1] = [x[:-1] for x in parts[-1]]  # replicas may have fewer rows
        whole = [np.concatenate(column) for column in zip(*parts, strict=True)]
        if is_padded:  # the last row of all is padding, which may have any numbers
            parts[-1][-1][-1] = 0
            whole = [x[:-1] for x in whole[:-1]]
        count = len(whole[0])
        if count not in self._one:
            arguments = self._searches[0], self._rows, self._compute, whole
            self._one[count] = _copied(
                _retrace(*arguments, parts=self._searches[0].parts, replicas=1), {}
            )
        for number in (None, LATE):
            for source in (*self._sources, self._one[count]):
                source.set_counters(number)
            statistics = self._observed(whole)
            one, scales = self._replicas(parts, statistics)
            two, _ = self._alone(whole, statistics, scales)
            differing = differ(one, two, ..., finite=True)
            if differing:  # or its numbers are not the same each time
                again, _ = self._replicas(parts, statistics)
                if differ(one, again, ..., finite=True):
                    return False
                return self._cause(differing, len(one)) or self._describe(count) or True
        return False

    def _cause(self, differing: set[int], count: int) -> Suspect | None:
        """Returns the cause that is a variable, if nothing but what is assigned differs."""
        first = min(differing) - (count - len(self._assigned))
        return self._searches[0].causes.get(self._assigned[first]) if first >= 0 else None

    def _describe(self, count: int) -> str:
        """Names a number that replicas use in place of another one."""
        traces = self._one[count].trace, self._traces[0]
        (one, two), inputs = map(losses_of, traces), [each.inputs for each in traces]
        found = loss_trace.compare(one[: len(two)], inputs[0], two[: len(one)], inputs[1])
        if found is None or found.op.type != "Const" or found.op.outputs[0].shape.rank != 0:
            return ""
        alone, number = found.values
        return f" ({place_of(found.op)} is {number} on each replica, and {alone} on one)"

    def _read(self, batches: Sequence[ReadBatch]) -> list[list[Any]]:
        """Returns a batch for each replica, made from the ones that can be read if there are fewer."""
        parts: list[list[Any]] = []
        for read in batches[: len(self._traces)]:
            with contextlib.suppress(ProbeError, *FAILURES):
                values, _ = self._searches[0].read(read, is_first=not parts)
                rows = [x.numpy() for x in values]
                is_like = not parts or [x.shape for x in rows] == [x.shape for x in parts[0]]
                parts += [rows] if is_like else []
        if not parts:
            raise ProbeError("there is no batch to compute it for")
        while len(parts) < len(self._traces):  # equal rows would hide what depends on their replica
            parts.append([_vary(x) for x in parts[-1]])
        if has_mask(self._traces[0]):
            parts = [[*part[:-1], np.ones_like(part[-1])] for part in parts]
        return parts

    def _state(self, trace: Trace) -> list[tf.Tensor]:
        """Returns what both assign to the same variables; nothing if other processes assign it, too."""
        if len(self._searches) < len(self._traces):
            return []
        one, state = next(iter(self._one.values())).trace, self._searches[0].state
        own, *others = (assigned(each, state) for each in (trace, one, self._traces[0]))
        values, self._assigned = list[tf.Tensor](), list[int]()
        for i in sorted(own):
            counts = {len(each.get(i, ())) for each in (own, *others)}
            # Micro-batches assign the same value each.
            chosen = own[i] if len(counts) == 1 else own[i][-1:] if 0 not in counts else []
            values += [x for each in chosen for x in values_of(each)]
            self._assigned += [i] * (len(values) - len(self._assigned))
        return values

    def _observe(self, whole: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        source = self._one[whole[0].shape[0]]
        copier = GraphCopier(source, source.known(whole))
        return [copier.tensor(x) for x in _statistics(source.trace)]

    def _compute_replicas(
        self, parts: Sequence[Sequence[tf.Tensor]], statistics: Sequence[tf.Tensor]
    ) -> "_Results":
        # The replicas of this process share a graph: what is assigned may be computed from all.
        copiers, shared, first = list[GraphCopier](), dict[int, Any](), 0
        for number, (source, part) in enumerate(zip(self._sources, parts, strict=True)):
            known = source.known(part, first) | _fixed(source.trace, statistics)
            if number in self._local:
                shared |= known
                known = shared
            else:
                known |= _numbers(source.trace, number)
            copiers.append(GraphCopier(source, known, fixed=True))
            first += part[0].shape[0]
        state = self._state(self._traces[0])
        reached = {id(x) for x in ancestors(*updated_values(self._traces[0]), *state)}
        for values in zip(*(each.global_values for each in self._traces), strict=True):
            if id(values[0].output) in reached:
                pairs = [*zip(copiers, values, strict=True)]
                joined = _join(values[0], [copier.tensor(x.local) for copier, x in pairs])
                for copier, x in pairs:
                    copier.set(x.output, joined)
        mask = tf.concat([part[-1] for part in parts], 0) if has_mask(self._traces[0]) else None
        results = _results(copiers, self._traces, mask)
        results.values.extend(map(copiers[0].tensor, state))
        return results

    def _compute_alone(
        self,
        whole: Sequence[tf.Tensor],
        statistics: Sequence[tf.Tensor],
        scales: Sequence[tf.Tensor],
    ) -> "_Results":
        source = self._one[whole[0].shape[0]]
        known = source.known(whole) | _fixed(source.trace, statistics)
        copier = GraphCopier(source, known, fixed=True)
        results = _results([copier], [source.trace], None, scales)
        results.values.extend(map(copier.tensor, self._state(source.trace)))
        return results


def _vary(x: np.ndarray) -> np.ndarray:
    """Moves rows by one, and makes numbers smaller, which are more likely to be valid than others."""
    moved = np.roll(x, 1, axis=0)
    return moved / 2 if x.dtype.kind == "f" else moved


def _copied(trace: Trace, first: Mapping[int, Any]) -> CopiedTrace:
    aliases = {key: x for update in trace.updates for key, x in update.aliases.items()}
    positions = [x for x in trace.positions if not x.shape.rank]
    statistics = [x.op for x in _statistics(trace)]
    return CopiedTrace(trace, first, aliases, statistics, positions)


def _statistics(trace: Trace) -> list[tf.Tensor]:
    """Returns the statistics of a replica's own rows that the losses contain, in order.

    Another check warns of them. They get the same values, and gradients are not compared.
    """
    of_all = {id(x.output) for x in trace.global_values}
    found = {x.op for x in ancestors(*losses_of(trace), stop=of_all) if is_statistics(x.op)}
    found = {op for op in found if op.type != "Cast" and not caller_of(op).endswith(_MOMENTS)}
    operations = symbolic(trace.inputs)[0].graph.get_operations() if found else []
    return [
        x for op in operations if op in found
        for x in (op.outputs[1:3] if op.type.startswith("FusedBatchNorm") else op.outputs)
    ]  # fmt: skip


def _fixed(trace: Trace, values: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
    return dict(zip(map(id, _statistics(trace)), values, strict=True))


def _numbers(trace: Trace, number: int) -> dict[int, tf.Tensor]:
    """Returns what stands for the number of the replica -> another one."""
    found = (x for x in ancestors(*updated_values(trace)) if loss_trace.is_replica_number(x.op))
    return {id(x): tf.constant(number, x.dtype) for x in found}


def _join(value: GlobalValue, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns what a collective returns."""
    if value.gathered:
        return tf.concat(parts, value.axis)
    total = tf.add_n(parts)
    return total / len(parts) if value.mean else total


class _Results(NamedTuple):
    """The losses and gradients of a step.

    Attributes:
        values: for each update the losses of the rows that exist, and all gradients in one tensor.
        scales: for each update, the largest number that its gradients are summed from.
    """

    values: list[tf.Tensor]
    scales: list[tf.Tensor]


def _results(
    copiers: Sequence[GraphCopier],
    traces: Sequence[Trace],
    mask: tf.Tensor | None,
    given: Sequence[tf.Tensor] | None = None,
) -> _Results:
    """Returns what replicas compute, with the scales of other results if they are given."""
    values, scales = list[tf.Tensor](), list[tf.Tensor]()
    has_statistics = bool(_statistics(traces[0]))
    for updates in zip(*(trace.updates for trace in traces), strict=True):
        pairs = [*zip(copiers, updates, strict=True)]
        parts = [(copier, x.losses) for copier, update in pairs for x in update.micro_batches]
        for i in range(len(parts[0][1])):
            losses = tf.concat([copier.tensor(x[i]) for copier, x in parts], 0)
            values.append(losses if mask is None else tf.boolean_mask(losses, mask > 0))
        values += map(copiers[0].tensor, conditions_of(updates[0]))
        if has_statistics:
            continue
        shares = [_flatten(copier, x) for copier, update in pairs for x in update.gradients]
        scales.append(tf.reduce_max(tf.abs(tf.stack(shares))))
        # A sum that is 0 has nothing but rounding, which is relative to its terms.
        scale = scales[-1] if given is None else given[len(scales) - 1]
        values.append(tf.concat([tf.add_n(shares), [scale]], 0))
    return _Results(values, scales)


def _flatten(copier: GraphCopier, gradients: Sequence[Any]) -> tf.Tensor:
    """Returns all gradients in one tensor, in the dtype of the tolerance for them."""
    tensors = []
    for x in gradients:
        if isinstance(x, tf.IndexedSlices):
            parts = [copier.tensor(each) for each in (x.values, x.indices, x.dense_shape)]
            tensors.append(tf.convert_to_tensor(tf.IndexedSlices(*parts)))
        elif x is not None:
            tensors.append(copier.tensor(x))
    operations = tf.compat.v1.get_default_graph().get_operations()
    sizes = {x.dtype.size for op in operations for x in op.outputs if x.dtype.is_floating}
    dtype = {2: tf.bfloat16, 4: tf.float32, 8: tf.float64}[min(sizes)]
    return tf.concat([tf.reshape(tf.cast(x, dtype), [-1]) for x in tensors], 0)
