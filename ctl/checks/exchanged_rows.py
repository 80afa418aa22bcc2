"""Computes the losses of all replicas for rows that are exchanged between them.

A collective may get what a replica has already combined, such as the mean of its own maximum: its
result is equal on all replicas, and yet depends on how the batch is split. So the traced losses of one
replica are copied for each, the collectives are replaced by sums and concatenations of these copies, and
rows in the same place are exchanged. Right losses are then exchanged in the same way.
"""

from collections.abc import Sequence
import contextlib
import logging
import os
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.checks import loss_trace, random_search
from ctl.checks.graph_copier import FAILURES, CopiedTrace, GraphCopier, ProbeError
from ctl.checks.read_batches import ReadBatch
from ctl.checks.row_flow import Mixed, RowFlow
from ctl.checks.row_probe import LATE, Probe, differ
from ctl.checks.searched_trace import FIX, SearchedTrace, reject
from ctl.graphs.dataflow import ancestors
from ctl.graphs.unoptimized import without_graph_optimization
from ctl.hardware.quiet import hold_back_stderr
from ctl.rows.trace import GlobalValue, Trace, UpdateTrace

_LOG = logging.getLogger("ctl")
_USE = "combines rows of the same replica before a collective combines the replicas"
_MOST_REPLICAS = 8  # whose losses are computed together
_GATHER = os.path.join("ctl", "rows", "gather.py")
Parts = Sequence[Sequence[Any]]  # of each replica: [rows, ...] each


def check(
    searched: SearchedTrace,
    update: UpdateTrace,
    flow: RowFlow,
    losses: Sequence[tf.Tensor],
    micro_batch: Sequence[tf.Tensor] = (),
) -> None:
    """Rejects losses that read a collective of combined rows, if its result depends on the split.

    Args:
        searched: the trace.
        update: the update.
        flow: finds where rows are combined.
        losses: the losses, or what `preprocess` and `sample_weight` returned.
        micro_batch: the rows of a micro-batch, whose losses these are.
    """
    is_part = bool(micro_batch) and searched.micro_batches > 1
    found = _find_combined(searched.trace, flow, losses, micro_batch if is_part else ())
    if not found or not searched.is_split:
        return
    op = found[0][1]
    if is_part:  # the collective has the rows of one micro-batch
        reject(op, _USE, FIX, split=True)
    if searched.replicas > _MOST_REPLICAS:  # each is a copy of the forward pass
        _LOG.warning(
            "%s %s. If the result depends on how the batch is split, the update does, too, which is "
            "not known for more than %s replicas: compare fewer by `ctl check`.",
            random_search.place(op), _USE, _MOST_REPLICAS,
        )  # fmt: skip
        return
    probe = Probe(losses, searched.trace, searched.first, update.aliases)

    def finds(batches: Sequence[ReadBatch]) -> bool:
        parts = _read_parts(searched, batches)
        return bool(parts) and change_losses(probe, [x for x, _ in found], parts)

    searched.examine(finds, op, _USE, FIX)


def _find_combined(
    trace: Trace, flow: RowFlow, losses: Sequence[tf.Tensor], stop: Sequence[tf.Tensor]
) -> list[tuple[tf.Tensor, Any]]:
    """Returns results of collectives of combined rows, each with the op that combines the rows."""
    reached = {id(x) for x in ancestors(*losses, stop={id(x) for x in stop})}
    # What is paired by the places of rows before a collective cannot be compared.
    places = {id(x) for x in trace.positions if x.shape.rank}
    values = [
        x for x in trace.global_values
        if id(x.output) in reached and places.isdisjoint(map(id, ancestors(x.local)))
    ]  # fmt: skip
    states = [(x.output, flow.state(x.local)) for x in values]
    found = [
        (x, s.op) for x, s in states if isinstance(s, Mixed) and not _is_own_gather(s.op)
    ]  # fmt: skip
    padded = values if has_mask(trace) else []
    return found + [(x.output, x.output.op) for x in padded if x.gathered]


def _is_own_gather(op: Any) -> bool:
    """Returns whether ctl puts rows into the slot of their replica, to gather them."""
    return any(frame.filename.endswith(_GATHER) for frame in op.traceback)


def _read_parts(searched: SearchedTrace, batches: Sequence[ReadBatch]) -> Parts:
    """Returns a batch for each replica; they repeat, moved by a row, if fewer can be read."""
    parts: list[list[Any]] = []
    for read in batches[: searched.replicas]:
        with contextlib.suppress(ProbeError, *FAILURES):
            rows = [x.numpy() for x in searched.read(read)[0]]
            is_like = not parts or [x.shape for x in rows] == [x.shape for x in parts[0]]
            parts += [rows] if is_like else []
    while parts and len(parts) < searched.replicas:
        parts.append([np.roll(x, 1, axis=0) for x in parts[-1]])
    return parts


def has_mask(trace: Trace) -> bool:
    """Returns whether the last input of a trace is the mask of the rows that exist."""
    return isinstance(trace.inputs, tuple) and trace.inputs[1] is not None


def change_losses(losses: Probe, values: Sequence[tf.Tensor], batches: Parts) -> bool:
    """Returns whether collectives, and so the losses, change with the replica that computes a row.

    Both must change: losses alone may pair rows by their positions in the global batch, and collectives
    alone may be reduced to what is the same, such as the largest of the largest.

    Args:
        losses: the losses of one replica; those of the others are the same function.
        values: results of collectives. With an entry for each row of all, it moves with its row.
        batches: the batch of each replica, with the same number of rows; at least two.
    """
    is_masked = has_mask(losses.trace)
    if is_masked:  # the last row of all becomes padding
        mask = np.array(batches[-1][-1])
        mask[-1] = 0
        batches = [*batches[:-1], [*batches[-1][:-1], mask]]
    functions: list[Any] = []
    rows = np.arange(len(batches[0][0]))

    def compute(batches: Parts) -> tuple[Parts, Sequence[Any]]:
        flat = [tf.convert_to_tensor(x) for batch in batches for x in batch]
        if not functions:
            traced = tf.function(
                lambda *flat: _compute(losses, values, flat, len(batches)), autograph=False
            )
            functions.append(traced.get_concrete_function(*flat))
        with without_graph_optimization(), hold_back_stderr(*FAILURES):
            parts, results = functions[0](*flat)
        if is_masked:
            pairs = zip(parts, batches, strict=True)
            parts = [[_choose(b[-1] > 0, x, tf.zeros_like(x)) for x in part] for part, b in pairs]
        return parts, results

    def move(value: Any, places: np.ndarray) -> Any:
        if not value.shape.rank or value.shape[0] != len(batches) * len(rows):
            return value
        return tf.concat(
            [x for (x,) in _exchange([[x] for x in tf.split(value, len(batches))], places)], 0
        )

    def changes(before: tuple[Parts, Sequence[Any]], batches: Parts, places: np.ndarray) -> bool:
        parts, results = compute(batches)
        expected = [move(value, places) for value in before[1]]
        pairs = zip(_exchange(before[0], places), parts, strict=True)
        return bool(differ(expected, results, ..., finite=True)) and any(
            differ(one, two, ..., finite=True) for one, two in pairs
        )

    for number in (None, LATE):
        with contextlib.suppress(ProbeError, *FAILURES), tf.init_scope():
            losses.source.set_counters(number)
            before = compute(batches)
            if is_masked:  # other numbers in the padding
                *others, last = batches
                last = [*(np.concatenate([x[:-1], x[:1]]) for x in last[:-1]), last[-1]]
                if changes(before, [*others, last], rows < 0):
                    return True
            if any(
                changes(before, _exchange(batches, places), places)
                for places in (rows % 2 == 0, rows % 2 == 1)
            ):
                return True
    return False


def _exchange(parts: Parts, places: np.ndarray) -> Parts:
    """Gives the rows in some places to the next replica."""
    pairs = [(part, parts[i - 1]) for i, part in enumerate(parts)]
    return [
        [_choose(places, new, own) for own, new in zip(part, before, strict=True)]
        for part, before in pairs
    ]


def _choose(rows: np.ndarray, values: Any, others: Any) -> Any:
    return tf.where(np.reshape(rows, [-1, *[1] * (np.ndim(values) - 1)]), values, others)


def _compute(
    probe: Probe, values: Sequence[tf.Tensor], flat: Sequence[tf.Tensor], replicas: int
) -> tuple[Parts, Sequence[tf.Tensor]]:
    width = len(flat) // replicas
    copiers: list[_ReplicaCopier] = []
    for i in range(replicas):
        known = probe.source.known(flat[i * width : (i + 1) * width])
        copiers.append(_ReplicaCopier(probe.source, known, number=i, all_copiers=copiers))
    losses = [[copier.tensor(value) for value in probe.values] for copier in copiers]
    return losses, [copiers[0].tensor(value) for value in values]


class _ReplicaCopier(GraphCopier):
    """Copies ops for one of several replicas, with the values of the global batch of all.

    Args:
        number: the number of the replica.
        all_copiers: those of all replicas, in order.
    """

    def __init__(
        self,
        source: CopiedTrace,
        known: dict[int, Any],
        *,
        number: int,
        all_copiers: "list[_ReplicaCopier]",
    ):
        super().__init__(source, known)
        self._number, self._all = number, all_copiers

    def _inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        value = self._source.global_values.get(id(tensor))
        if value is not None:
            joined = _join(value, [each.tensor(value.local) for each in self._all])
            for each in self._all:
                each._copies[id(tensor)] = joined
            return []
        if hasattr(tensor, "op") and loss_trace.is_replica_number(tensor.op):
            self._copies[id(tensor)] = tf.constant(self._number, tensor.dtype)
            return []
        return super()._inputs(tensor)


def _join(value: GlobalValue, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns what a collective returns."""
    if value.gathered:
        return tf.concat(parts, value.axis)
    total = tf.add_n(parts)
    return total / len(parts) if value.mean else total
