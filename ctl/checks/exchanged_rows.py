"""Computes the losses of all replicas for rows that are exchanged between them.

A collective may get what a replica has already combined, such as the mean of its own maximum: its
result is equal on all replicas, and yet depends on how the batch is split. So the traced losses of one
replica are copied for each, the collectives are replaced by sums and concatenations of these copies, and
rows in the same place are exchanged. The losses must be the same with the collectives of both.
"""

from collections.abc import Iterable, Sequence
import contextlib
import logging
import os
from typing import Any

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
from ctl.checks.row_flow import Mixed, RowFlow
from ctl.checks.row_probe import Probe, differ
from ctl.checks.searched_trace import FIX, SearchedTrace, reject
from ctl.graphs.dataflow import ancestors
from ctl.graphs.places import place_of
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
            place_of(op), _USE, _MOST_REPLICAS,
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


def change_losses(losses: Probe, values: Sequence[tf.Tensor], batches: Parts) -> bool:
    """Returns whether losses depend on collectives that change with the replica that computes a row.

    Rows are exchanged for the collectives alone. So the losses may pair rows by their positions in the
    global batch, and reduce the collectives to what is the same, such as the largest of the largest.

    Args:
        losses: the losses of one replica; those of the others are the same function.
        values: results of collectives. With an entry for each row of all, it moves with its row.
        batches: the batch of each replica, with the same number of rows; at least two.
    """
    rows = np.arange(len(batches[0][0]))
    others = [(_exchange(batches, places, 1), places) for places in (rows % 2 == 0, rows % 2 == 1)]
    if has_mask(losses.trace):  # the last row of all becomes padding, which may have any numbers
        *first, (*last, mask) = batches
        mask = np.where(rows < len(rows) - 1, mask, 0)
        batches = [*first, [*last, mask]]
        moved = [np.concatenate([x[:-1], x[:1]]) for x in last]
        others = [(_exchange(batches, places, 1), places) for _, places in others]
        others.append(([*first, [*moved, mask]], rows < 0))

    @Computation
    def collect(parts: Parts) -> list[tf.Tensor]:
        copier, *_ = _copy(losses, parts)
        return [copier.tensor(value) for value in values]

    @Computation
    def compute(parts: Parts, collected: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        copiers = _copy(losses, parts, zip(map(id, values), collected, strict=True))
        found = [
            (copier.tensor(x), part)
            for copier, part in zip(copiers, parts, strict=True) for x in losses.values
        ]  # fmt: skip
        if not has_mask(losses.trace):
            return [x for x, _ in found]
        return [_choose(part[-1] > 0, x, tf.zeros_like(x)) for x, part in found]

    for number in (None, LATE):
        with contextlib.suppress(ProbeError, *FAILURES), tf.init_scope():
            losses.source.set_counters(number)
            collected = collect(batches)
            for exchanged, places in others:
                results = [_restore(x, len(batches), places) for x in collect(exchanged)]
                if differ(collected, results, ..., finite=True) and differ(
                    compute(batches, collected), compute(batches, results), ..., finite=True
                ):
                    return True
    return False


def _exchange(parts: Parts, places: np.ndarray, distance: int) -> Parts:
    """Gives the rows in some places to the replica at a distance."""
    moved = [*np.roll(range(len(parts)), distance)]
    pairs = [(part, parts[i]) for part, i in zip(parts, moved, strict=True)]
    return [
        [_choose(places, new, own) for own, new in zip(part, before, strict=True)]
        for part, before in pairs
    ]


def _restore(value: tf.Tensor, replicas: int, places: np.ndarray) -> tf.Tensor:
    """Gives the rows of all that were exchanged back; what has other entries stays as it is."""
    if not value.shape.rank or value.shape[0] != replicas * len(places):
        return value
    parts = [[part] for part in tf.split(value, replicas)]
    return tf.concat([part for (part,) in _exchange(parts, places, -1)], 0)


def _choose(rows: Any, values: Any, others: Any) -> Any:
    return tf.where(tf.reshape(rows, [-1, *[1] * (len(values.shape) - 1)]), values, others)


def _copy(
    probe: Probe, parts: Parts, given: Iterable[tuple[int, tf.Tensor]] = ()
) -> "list[_ReplicaCopier]":
    """Returns what copies the ops of each replica, for its batch and values that are known."""
    copiers: list[_ReplicaCopier] = []
    values = dict(given)
    for i, part in enumerate(parts):
        known = probe.source.known(part) | values
        copiers.append(_ReplicaCopier(probe.source, known, number=i, all_copiers=copiers))
    return copiers


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
