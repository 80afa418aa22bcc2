"""Rejects losses that contain the number of the replica, other than in the positions of its rows."""

from collections.abc import Sequence
import contextlib
from typing import Any

import tensorflow as tf

from ctl.checks import loss_trace
from ctl.checks.graph_copier import FAILURES, LATE, ProbeError
from ctl.checks.read_batches import ReadBatch
from ctl.checks.row_probe import Probe, differ
from ctl.checks.searched_trace import PLACE_FIX, SearchedTrace
from ctl.graphs.dataflow import ancestors
from ctl.rows.trace import UpdateTrace, symbolic


def reads_number(searched: SearchedTrace, update: UpdateTrace, values: Sequence[tf.Tensor]) -> bool:
    """Returns whether values contain the number of the replica, other than in ctl's positions."""
    trace = searched.trace
    known = [*trace.positions, *(each.output for each in trace.global_values)]
    known += symbolic([part.first_row for part in update.micro_batches])
    sources = ancestors(*values, stop={id(x) for x in known})
    return any(loss_trace.is_replica_number(x.op) for x in sources)


def check(
    one: SearchedTrace, two: SearchedTrace, updates: tuple[UpdateTrace, UpdateTrace], op: Any
) -> None:
    """Raises a UsageError if losses of two replicas are not equal for the same rows.

    Args:
        one: the trace of a replica.
        two: the trace of another one.
        updates: the same update of both.
        op: the op that makes a number of the second replica which is no position of ctl.
    """
    both = (one, two)
    probes = [
        Probe([*u.micro_batches[0].losses, *u.inputs], each.trace, each.first, u.aliases)
        for u, each in zip(updates, both, strict=True)
    ]

    def are_equal(batch: Any, *, late: int | None, distinct: bool) -> bool | None:
        """Compares the losses; None if they cannot be computed."""
        results = []
        with contextlib.suppress(ProbeError, *FAILURES):
            for probe, each in zip(probes, both, strict=True):
                fixed = probe.observe(batch)
                fixed = probe.make_distinct(fixed, each.number) if distinct else fixed
                results.append(probe.compute(batch, fixed, late))
        return not differ(results[0], results[1], ...) if len(results) == 2 else None

    def finds(batches: Sequence[ReadBatch]) -> bool:
        batch = two.read(batches[0])[0]
        return any(
            are_equal(batch, late=late, distinct=False) is False
            and not are_equal(batch, late=late, distinct=True)
            for late in (None, LATE)
        )

    two.examine(finds, op, "uses the number of the replica", PLACE_FIX)
