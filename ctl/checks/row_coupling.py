"""Rejects losses in which a row of the batch depends on other rows of its replica or micro-batch.

The ops from the batch to the losses are searched while the step is traced; nothing is added to the
graph. An op that may combine rows is a suspect. The losses are then computed with other rows exchanged,
before the first step, for batches of the whole epoch and for rows that are made up from them: if the
loss of a row changes, it is rejected. It must not change either if the replica begins one row later, as
it does on another split. The batches of steps 1, 2, 4, ... are computed in the same way, after these
steps. A trace with one row cannot show that, so the step is then traced again with several.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.built.observers import Losses, Observer, TraceAgain
from ctl.checks import exchanged_rows, loss_trace, random_search, users_code
from ctl.checks.row_flow import Mixed, RowFlow, is_statistics
from ctl.checks.row_probe import (
    FAILURES,
    LATE,
    Probe,
    ProbeError,
    ReadBatch,
    differ,
    find_dependent,
    read_existing,
    read_values,
)
from ctl.checks.row_rules import Place
from ctl.data.autograph import traced
from ctl.errors import UsageError
from ctl.graphs import ops
from ctl.graphs.dataflow import ancestors, outer_tensor
from ctl.rows import row_mask
from ctl.rows.row_mask import Rows
from ctl.rows.trace import Trace, UpdateTrace, symbolic
from ctl.update import loss
from ctl.update.microbatches import row_count
from ctl.version import FOLDER

_LOG = logging.getLogger("ctl")
_ACCEPT = "or accept it with allow_row_coupling=True (runtime.allow_row_coupling)"
_FIX = (
    "use ctl.replica.all_gather(x), the rows of the global batch, from which ctl.replica.positions(x) "
    "or ctl.random.permutation_of_batch() select, or ctl.SyncBatchNormalization for statistics"
)
_PLACE_FIX = (
    "use ctl.replica.positions(x), the places of these rows among the rows of the global batch, which "
    "ctl.replica.all_gather(x) returns"
)
# Ops that turn an integer into a number of a loss, or into a condition.
_NUMBERS = ("Cast", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual")
_COLLECTIVE_USE = "combines rows of the same replica before a collective combines the replicas"
_SIZES = ("Shape", "ShapeN", "Size")
_REPEATS = ("BroadcastTo", "Fill", "OnesLike", "Tile", "ZerosLike")  # one number for each row
_MOST_REPLICAS = 8  # whose losses are computed together
_GATHER = os.path.join("ctl", "rows", "gather.py")
_PENALTY_FIX = "return the penalty of each row from forward, and add it in per_example_loss"
_OUTPUTS = "outputs"  # what is computed from variables
_REDUCTIONS = ("All", "Any", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum")
# Ops that only move rows, which later ops may put back.
_MOVING = (
    "BatchToSpaceND", "BroadcastTo", "ConcatV2", "DynamicPartition", "DynamicStitch", "ExpandDims",
    "GatherNd", "GatherV2", "Pack", "Pad", "PadV2", "Reshape", "ReverseV2", "Roll", "ScatterNd",
    "Slice", "SpaceToBatchND", "Split", "SplitV", "Squeeze", "StridedSlice", "TensorListFromTensor",
    "TensorListStack", "Tile", "Transpose", "Unique", "Unpack", "Where",
)  # fmt: skip
# What may hide a reduction in all batches.
_BOUNDS = (
    "Greater", "GreaterEqual", "Less", "LessEqual", "Maximum", "Minimum", "Relu", "Relu6",
)  # fmt: skip
_TENSORFLOW, _KERAS = (os.path.join("site-packages", name) for name in ("tensorflow", "tf_keras"))
_PARTS = (0.25, 0.5, 0.75, 0.99)  # of the epoch, whose batches are read besides the next one
# How code reads a static number of rows.
_STATIC = r"shape(\.dims|\.as_list\(\)|\(\))?\[0\]|static_value|as_list\(\)"
_ROWS = 4  # of a micro-batch, if the step is traced again
Compute = Callable[[Any], Any]
Again = Callable[[Sequence[ReadBatch]], object]


class RowCoupling(Observer):
    """Searches the losses of training steps."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Raises a UsageError if the loss of a row depends on other rows of the replica."""
        plan = self.step.plan
        if rows.earlier is None and not plan.options.allow_row_coupling:
            read = self.step.first_batch
            batches: list[ReadBatch] = [read, *(functools.partial(read, part) for part in _PARTS)]
            again = search(rows, plan.layout.replicas, batches, self.step.compute)
            self.step.repeated.extend(again)

    @classmethod
    def check_losses(
        cls, step: Any, losses: Losses | None, trace_again: TraceAgain | None, name: str
    ) -> None:
        """Raises a UsageError if losses depend on the number of rows of a replica or micro-batch."""
        plan, fewer, count = step.plan, None, 0
        if plan.options.allow_row_coupling:
            return
        # The code may compute something else if no number of rows is known while it is traced.
        is_static = losses is None or users_code.names(step, _STATIC)
        if is_static and trace_again:
            with contextlib.suppress(Exception):  # the step reports it
                batch, mask = step.first_batch()
                count = row_count(batch) if mask is None else int(tf.math.count_nonzero(mask))
                losses, fewer = trace_again(count), trace_again(count - 1)  # or none of them
        if losses:
            split = plan.layout.replicas * plan.micro_batches > 1
            try:
                check_count(losses, step.first_batch, name=name, split=split, fewer=fewer)
            except UsageError:
                # A counter in Python computes other losses in each trace, which the step reports.
                one, two = (
                    trace_again(count) if fewer and trace_again else losses for _ in range(2)
                )
                compared = (one.values, one.trace.inputs, two.values, two.trace.inputs)
                if loss_trace.compare(*compared) is None:
                    raise


def search(
    rows: Rows, replicas: int, batches: Sequence[ReadBatch], compute: Compute
) -> list[Again]:
    """Searches the losses that a replica has traced.

    Args:
        rows: the rows of the replica, with its trace.
        replicas: the number of replicas that compute the global batch.
        batches: return batches of a replica, like the tensors of the trace, and their masks. They may
            have more rows, and all but the first may fail.
        compute: what was traced, as a function of a batch.

    Returns:
        Functions that repeat the search where the ops do not show that rows are independent, for other
        batches.

    Raises:
        UsageError: the loss of a row depends on other rows of the replica, or the replicas compute
            different functions of their rows. The message names the user's line of code.
    """
    trace = rows.trace
    if not symbolic(trace.inputs):
        return []
    # On several replicas the first position is computed from the rows of all.
    numbers = symbolic([rows.first_row, rows.step])
    first = {id(x): np.zeros([], x.dtype.as_numpy_dtype) for x in numbers}
    trace.positions.extend(symbolic([rows.first_row]))
    context: Any = tf.distribute.get_replica_context()
    number = int(tf.get_static_value(context.replica_id_in_sync_group) or 0)
    found = _CouplingSearch(
        trace, replicas, rows.micro_batches, batches, rows.allow_unkeyed, first, number
    )
    # The graph keeps the searches, because it also keeps their tensors.
    earlier = trace.call.get("searches", [])
    trace.call["searches"] = [*earlier, found]
    if earlier:  # another replica of this process, in the same graph
        difference, own = loss_trace.compare_replicas(earlier[0].trace, trace, len(earlier))
        _check_equal(difference, "replicas")
        if own is not None:
            for pair in zip(earlier[0].trace.updates, trace.updates, strict=False):
                found.check_number(earlier[0], pair, own)
        return found.again
    try:
        found.run()
    except ProbeError as unknown:
        try:
            with tf.init_scope(), futures.ThreadPoolExecutor(1) as thread:  # in no strategy
                again = thread.submit(_check_again, rows, replicas, batches[0], compute)
                return again.result()
        except ProbeError as error:
            op = error.op or unknown.op
            if op is not None and replicas * rows.micro_batches > 1:
                _LOG.warning(
                    "%s may combine rows of the same replica or micro-batch (%s), which is not known: "
                    "%s. If it does, the update depends on how the batch is split, which `ctl check` "
                    "measures.",
                    random_search.place(op), op.type, error,
                )  # fmt: skip
    return found.again


def _check_again(rows: Rows, replicas: int, read_batch: ReadBatch, compute: Compute) -> list[Again]:
    """Checks the losses of a step that is traced again, with several rows in each micro-batch."""
    count = _ROWS * rows.micro_batches
    batch = tf.nest.map_structure(lambda x: x[:count], read_existing(read_batch, count, rows.trace))
    traces: list[Trace] = []

    def step(batch: Any) -> None:
        traces.append(trace := Trace(batch, losses_only=True))
        again = dataclasses.replace(
            rows, row_mask=None, first_row=tf.zeros([], tf.int64), step=0, count=count,
            graph=tf.compat.v1.get_default_graph(), single=False, trace=trace,
        )  # fmt: skip
        trace.positions.append(again.first_row)
        with row_mask.replay(again, {}), trace.record_collectives():
            compute(batch)

    try:
        traced(step).get_concrete_function(batch)
    # The code may require the number of rows that it has, or fail once the losses are known.
    except Exception as error:
        updates = [each for trace in traces for each in trace.updates if each.micro_batches]
        if len(updates) < len(rows.trace.updates):
            reason = f"the step cannot be traced with {_ROWS} rows ({type(error).__name__})"
            raise ProbeError(reason) from error
    read = [lambda: (batch, None)]
    found = _CouplingSearch(traces[0], replicas, rows.micro_batches, read, rows.allow_unkeyed)
    found.run()
    return found.again


def check_count(
    losses: Losses, read_batch: ReadBatch, *, name: str, split: bool, fewer: Losses | None = None
) -> None:
    """Rejects losses that depend on the number of rows that a replica or a micro-batch has.

    Such a loss is divided twice, and the first divisor depends on the split. In a trace of a step that
    number is a constant, so the losses of a trace with any number of rows are searched. If a number of
    rows is in them, they are computed for the first batch with and without its last row.

    Args:
        losses: the losses in a graph in which the number of rows is not known; or, with `fewer`, in
            one for the rows of the first batch.
        read_batch: returns the first batch of a replica, like the tensors of the trace, and its mask.
        name: the user's loss function, for the message.
        split: whether the batch is split. If not, a warning is logged.
        fewer: the losses of one row less, if they require a static number of rows.

    Raises:
        UsageError: the loss of a row depends on the number of rows.
    """
    # A row may depend on the rows of all replicas, and so on their number.
    if losses.trace.global_values:
        return
    values = [*losses.values, *losses.weights]
    if fewer is None and not any(_counts_rows(each, losses.trace) for each in values):
        return

    # Statistics may depend on the number of rows, also those of rows that are drawn at random.
    statistics = [x.op for x in ancestors(*losses.values) if is_statistics(x.op)]
    probe = Probe(values, losses.trace, statistics=statistics)
    dropped = probe
    if fewer:
        statistics = [x.op for x in ancestors(*fewer.values) if is_statistics(x.op)]
        of_fewer = [*fewer.values, *fewer.weights]
        dropped = Probe(of_fewer, fewer.trace, statistics=statistics)
    try:
        depends_on_number = find_dependent(probe, [read_batch], None, dropped=dropped)
        # A loss that depends on the other rows is rejected by `search`, with a message of its own.
        if not depends_on_number or find_dependent(probe, [read_batch], None):
            return
    except ProbeError:  # it is not known
        return
    is_weight = all(i >= len(losses.values) for i in depends_on_number)
    name, what, one = (
        ("sample_weight", "weights", "weight") if is_weight else (name, "losses", "loss")
    )
    line = (
        f"{name} returns {what} that depend on the number of rows of a replica or micro-batch, so the "
        f"update depends on how the batch is split: return the {one} of each row, since ctl divides "
        f"by the weight of the global batch, {_ACCEPT}."
    )
    if split:
        raise UsageError(line)
    _warn(line)


def _counts_rows(losses: tf.Tensor, trace: Trace) -> bool:
    """Returns whether losses perhaps contain a number of rows, as a float, or a sum over rows."""
    flow = RowFlow({id(x): Place(0) for x in symbolic(trace.inputs)}, count=None)
    if isinstance(flow.state(losses), Mixed):
        return True
    # A shape that is used as a shape remains an integer, and a sum of equal numbers is their number.
    stack, seen = [(losses, False, False)], set()
    while stack:
        tensor, is_cast, is_summed = stack.pop()
        key = (id(tensor), is_cast, is_summed)
        if key in seen or not hasattr(tensor, "op"):
            continue
        seen.add(key)
        op = tensor.op
        # Draws are keyed by the places of rows, and statistics are kept as they are.
        if ops.KEYED_BITS in op.name or is_statistics(op):
            continue
        if (is_cast and op.type in _SIZES) or (is_summed and op.type in _REPEATS):
            return True
        if op.type in ops.FUNCTIONS and any(
            x.type in (*_SIZES, "OnesLike") for x in ops.with_called([op])
        ):
            return True
        is_cast |= op.type in _NUMBERS and op.inputs[0].dtype.is_integer
        axes = tf.get_static_value(op.inputs[1]) if op.type == "Sum" else ()
        is_summed |= axes is None or 0 in np.ravel(axes)
        stack += [(x, is_cast, is_summed) for x in op.inputs]
    return False


@dataclasses.dataclass
class _CouplingSearch:
    """The search of one trace.

    Attributes:
        trace: the trace of a replica.
        replicas: the number of replicas that compute the global batch.
        micro_batches: the number of micro-batches.
        batches: as for `search`.
        allow_unkeyed: whether numbers may be drawn for the place of a row in its replica.
        first: the id of a tensor of the trace -> its value in the first step.
        number: the number of the replica.
        again: as the result of `search`.
    """

    trace: Trace
    replicas: int
    micro_batches: int
    batches: Sequence[ReadBatch]
    allow_unkeyed: bool
    first: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    number: int = 0
    again: list[Again] = dataclasses.field(default_factory=list)

    def run(self) -> None:
        """Raises a UsageError, or a ProbeError if the trace cannot show what the losses are."""
        for update in self.trace.updates:
            self._check_update(update)
            if not loss_trace.has_equal_parts(update):
                raise ProbeError("no two micro-batches have the same number of rows")
        _check_equal(loss_trace.compare_micro_batches(self.trace), "micro-batches")

    def _check_update(self, update: UpdateTrace) -> None:
        tensors = symbolic(self.trace.inputs)
        positions = [x for x in self.trace.positions if x.shape.rank]
        batch = {id(x): Place(0) for x in (*tensors, *positions)}
        clean = [id(value.output) for value in self.trace.global_values]
        count = tensors[0].shape[0] if tensors[0].shape.rank else None

        # The undivided batch, up to what `preprocess` and `sample_weight` returned.
        row_wise = self.trace.row_wise
        prepared = RowFlow(batch, count=count, clean=clean, row_wise=row_wise)
        self._check(update, prepared, update.inputs, count, micro_batches=1)

        part = update.micro_batches[0]
        leading = {id(x): Place(0) for x in part.rows if x.shape.rank}
        rows = part.size if isinstance(part.size, int) else None

        def resolve(tensor: tf.Tensor) -> tf.Tensor | None:
            alias = update.aliases.get(id(tensor))
            return outer_tensor(tensor) if alias is None else alias

        losses = RowFlow(
            {**batch, **leading}, count=rows, clean=clean, resolve=resolve, row_wise=row_wise
        )
        self._check(update, losses, part.losses, rows, micro_batches=self.micro_batches)
        if self.micro_batches > 1:  # those of `preprocess` have the rows of all micro-batches
            self._check_collectives(update, prepared, update.inputs)
        self._check_collectives(update, losses, part.losses, part.rows)
        for penalty in update.penalties[0] if update.penalties else ():
            if rows == 1:
                raise ProbeError("a micro-batch has one row")
            op = getattr(losses.state(penalty), "op", penalty.op)
            self._check_sum(update, losses, [penalty], op, "", _PENALTY_FIX)
        self._check_gradients(update, losses)

    def _check_sum(
        self, update: UpdateTrace, flow: RowFlow, values: Sequence[tf.Tensor], op: Any, seen: str,
        fix: str,
    ) -> None:  # fmt: skip
        """Rejects values that are not sums of terms of single rows, which an op combines."""
        probe = Probe(values, self.trace, self.first, update.aliases, flow.statistics)

        def examine(batches: Sequence[ReadBatch]) -> None:
            is_sum = True
            with contextlib.suppress(ProbeError, *FAILURES), tf.init_scope():
                is_sum = probe.is_sum_of_rows(*self.read(batches[0]))
            if not is_sum:
                use = f"combines rows of the same replica or micro-batch ({op.type}){seen}"
                self._reject(op, use, fix, split=self.replicas * self.micro_batches > 1)

        examine(self.batches)
        self.again.append(examine)

    def _check_collectives(
        self,
        update: UpdateTrace,
        flow: RowFlow,
        losses: Sequence[tf.Tensor],
        micro_batch: Sequence[tf.Tensor] = (),
    ) -> None:
        """Rejects losses that read a collective of combined rows, if its result depends on the split.

        Args:
            update: the update.
            flow: finds where rows are combined.
            losses: the losses, or what `preprocess` and `sample_weight` returned.
            micro_batch: the rows of a micro-batch, whose losses these are.
        """
        is_part = bool(micro_batch) and self.micro_batches > 1
        stop = {id(x) for x in micro_batch} if is_part else set()
        reached = {id(x) for x in ancestors(*losses, stop=stop)}
        values = [x for x in self.trace.global_values if id(x.output) in reached]
        has_mask = exchanged_rows.has_mask(self.trace)
        # What is paired by the places of rows before a collective cannot be compared.
        places = {id(x) for x in self.trace.positions if x.shape.rank}
        values = [x for x in values if places.isdisjoint(map(id, ancestors(x.local)))]
        mixed = [(x, flow.state(x.local)) for x in values]
        found = [
            (x.output, state.op) for x, state in mixed
            if isinstance(state, Mixed) and not _is_own_gather(state.op)
        ]  # fmt: skip
        found += [
            (x.output, x.output.op) for x in values if x.gathered and has_mask
        ]  # with padding
        suspects = [op for _, op in found]
        if not suspects or self.replicas * self.micro_batches == 1:
            return
        if is_part:  # the collective has the rows of one micro-batch
            self._reject(suspects[0], _COLLECTIVE_USE, _FIX, split=True)
        if self.replicas > _MOST_REPLICAS:  # each is a copy of the forward pass
            _LOG.warning(
                "%s %s. If the result depends on how the batch is split, the update does, too, which is "
                "not known for more than %s replicas: compare fewer by `ctl check`.",
                random_search.place(suspects[0]), _COLLECTIVE_USE, _MOST_REPLICAS,
            )  # fmt: skip
            return
        probe = Probe(losses, self.trace, self.first, update.aliases)

        def examine(batches: Sequence[ReadBatch]) -> None:
            parts: list[list[Any]] = []
            for read in batches[: self.replicas]:
                with contextlib.suppress(ProbeError, *FAILURES), tf.init_scope():
                    rows = [x.numpy() for x in self.read(read)[0]]
                    is_like = not parts or [x.shape for x in rows] == [x.shape for x in parts[0]]
                    parts += [rows] if is_like else []
            while parts and len(parts) < self.replicas:
                parts.append([np.roll(x, 1, axis=0) for x in parts[-1]])
            if parts and exchanged_rows.change_losses(probe, [x for x, _ in found], parts):
                self._reject(suspects[0], _COLLECTIVE_USE, _FIX, split=True)

        examine(self.batches)
        self.again.append(examine)

    def _check_gradients(self, update: UpdateTrace, flow: RowFlow) -> None:
        """Rejects gradients that depend on other rows than the losses show.

        Only where tf.stop_gradient gets what combines rows, or the user has written a gradient: to
        compute them takes longer.
        """
        # With one replica, the gradient of what is normalized or weighted depends on sums over its rows.
        sums = [*flow.statistics, *self.trace.weights] if self.replicas == 1 else []
        plain = any(op.type.startswith("FusedBatchNorm") for op in flow.statistics)  # warned of
        if not update.gradients or sums or plain:
            return
        for tensor in ancestors(*update.micro_batches[0].losses):
            state, seen = flow.state(tensor), ""
            for op in ops.with_called([tensor.op]):
                if op.type == "StopGradient" and isinstance(state, Mixed):
                    seen = ", as seen in the gradients beside tf.stop_gradient"
                elif _is_users_gradient(op):
                    seen = ", as seen in the gradient of tf.custom_gradient"
            if seen:
                dense = [getattr(x, "values", x) for x in update.gradients[0] if x is not None]
                op = state.op if isinstance(state, Mixed) else tensor.op
                self._check_sum(update, flow, dense, op, seen, _FIX)
                return

    def _check(
        self,
        update: UpdateTrace,
        flow: RowFlow,
        values: Sequence[tf.Tensor],
        count: int | None,
        *,
        micro_batches: int,
    ) -> None:
        """Raises a UsageError, or warns if the batch is not split, if the rows affect each other."""
        states = [(value, flow.state(value)) for value in values]
        suspects = [(value, state.op) for value, state in states if isinstance(state, Mixed)]
        suspects += [(x, x.op) for x, state in states if state is None and flow.uses_places(x)]
        if not suspects:
            if count == 1 and self.trace.global_values:
                raise ProbeError("a micro-batch has one row")
            return
        positions = None if self.allow_unkeyed else self.trace.positions
        own_places = self._reads_number(update, values)
        first, probes = suspects[0][1], {}

        def dependent(
            batches: Sequence[ReadBatch], values: Sequence[tf.Tensor]
        ) -> tuple[list[tf.Tensor], set[int]]:
            key = tuple(map(id, values))
            if key not in probes:
                probes[key] = Probe(
                    values, self.trace, self.first, update.aliases, flow.statistics, positions,
                    own_places,
                )  # fmt: skip
            probe = probes[key]
            others = find_dependent(probe, batches, count, micro_batches)
            by_place = {id(values[i]) for i in probe.by_place - others}
            return [values[i] for i in sorted(others | probe.by_place)], by_place

        def examine(batches: Sequence[ReadBatch]) -> bool:
            op = first
            try:
                losses, by_place = dependent(batches, [value for value, _ in suspects])
            except ProbeError as error:
                error.op = op
                if error.counts:  # such as by tf.boolean_mask; the step would report it later
                    raise UsageError(loss.OTHER_COUNT.format(*error.counts)) from error
                raise
            if not losses:
                return False
            # The first suspect may be harmless: what it computes shows that.
            known = flow
            with contextlib.suppress(ProbeError):
                known = flow.without_suspects(lambda values: dependent(batches, values)[0])
                op = getattr(known.state(losses[0]), "op", op)
            if id(losses[0]) in by_place:
                use, fix = (
                    f"uses the place of a row among the rows of its replica ({op.type})",
                    _PLACE_FIX,
                )
            else:
                described = _describe_op(self.trace, known, op)
                use, fix = f"combines rows of the same replica or micro-batch ({described})", _FIX
            self._reject(op, use, fix, split=self.replicas * micro_batches > 1)
            return True

        def examine_again(batches: Sequence[ReadBatch]) -> None:
            with contextlib.suppress(ProbeError):  # such as a batch of one row, which shows nothing
                examine(batches)

        def is_row_wise(tensor: tf.Tensor) -> bool:
            with contextlib.suppress(ProbeError):
                if tensor.shape[:1].is_compatible_with([count]):
                    found, _ = dependent(self.batches, [tensor])
                    return not found and not probes[(id(tensor),)].constant
            return False

        if not examine(self.batches):
            self.again.append(examine_again)
            if self.replicas * micro_batches > 1:
                (probe,) = probes.values()
                tensors = [x for x, _ in suspects]
                self._warn_of_reductions(update, flow, probe, tensors, count, is_row_wise)

    def _reject(self, op: Any, use: str, fix: str, *, split: bool) -> None:
        line = (
            f"{random_search.place(op)} {use}, so the loss of a row depends on how the batch is "
            f"split: {fix}, {_ACCEPT}."
        )
        if split:
            raise UsageError(line)
        # All rows are those of one replica: the update is right, until the config splits the batch.
        _warn(line)

    def check_number(
        self, other: "_CouplingSearch", updates: tuple[UpdateTrace, UpdateTrace], op: Any
    ) -> None:
        """Raises a UsageError if losses are not those of another replica for the same rows.

        Args:
            other: the search of the other replica.
            updates: the same update of the other replica, and of this one.
            op: the op that makes a number of this replica which is no position of ctl.
        """
        probes = [
            Probe([*u.micro_batches[0].losses, *u.inputs], each.trace, each.first, u.aliases)
            for u, each in zip(updates, (other, self), strict=True)
        ]

        def compute(batch: Any, *, late: int | None, distinct: bool) -> list[Any] | None:
            results = []
            with contextlib.suppress(ProbeError, *FAILURES), tf.init_scope():
                for probe, number in zip(probes, (other.number, self.number), strict=True):
                    fixed = probe.observe(batch)
                    fixed = probe.make_distinct(fixed, number) if distinct else fixed
                    results.append(probe.compute(batch, fixed, late))
            return results if len(results) == 2 else None

        def examine(batches: Sequence[ReadBatch]) -> None:
            batch: Any = None
            with contextlib.suppress(ProbeError, *FAILURES), tf.init_scope():
                batch = self.read(batches[0])[0]
            for late in (None, LATE):
                found = compute(batch, late=late, distinct=False) if batch is not None else None
                if found and differ(found[0], found[1], slice(None)):
                    found = compute(batch, late=late, distinct=True)
                    if found is None or differ(found[0], found[1], slice(None)):
                        self._reject(op, "uses the number of the replica", _PLACE_FIX, split=True)

        examine(self.batches)
        self.again.append(examine)

    def read(self, batch: ReadBatch) -> tuple[list[tf.Tensor], list[bool]]:
        """Returns the values of a batch for the trace, and which of them are labels."""
        size = symbolic(self.trace.inputs)[0].shape[0]
        return read_values(self.trace, batch, size, least=2)

    def _reads_number(self, update: UpdateTrace, values: Sequence[tf.Tensor]) -> bool:
        """Returns whether values contain the number of the replica, other than in ctl's positions."""
        known = [*self.trace.positions, *(each.output for each in self.trace.global_values)]
        known += symbolic([part.first_row for part in update.micro_batches])
        sources = ancestors(*values, stop={id(x) for x in known})
        return any(loss_trace.is_replica_number(x.op) for x in sources)

    def _warn_of_reductions(
        self,
        update: UpdateTrace,
        flow: RowFlow,
        probe: Probe,
        values: Sequence[tf.Tensor],
        count: int | None,
        is_row_wise: Callable[[tf.Tensor], bool],
    ) -> None:
        """Warns of a reduction over the rows that the losses depend on, although no batch shows it."""

        def changes(shifted: Sequence[tf.Tensor], bounds: Mapping[int, tf.Tensor]) -> bool:
            aliases = {**update.aliases, **bounds}
            other = Probe(values, self.trace, self.first, aliases, flow.statistics, shifted=shifted)
            with contextlib.suppress(ProbeError, *FAILURES), tf.init_scope():
                return probe.is_changed_by(other, *self.read(self.batches[0]))
            return False

        mixed = [
            (x, state.op) for x in ancestors(*values) if isinstance(state := flow.state(x), Mixed)
            # Otherwise it is a shape or an index, such as the largest length.
            and (not x.dtype.is_integer or any(each.type == "Cast" for each in x.consumers()))
        ]  # fmt: skip
        reductions = [x for x, _ in mixed if _reduces(flow, x, count)]
        tried: list[Any] = [(x.op, x, [x], {}) for x in reductions]
        for x, first in mixed:
            number = next((n for n in x.op.inputs if isinstance(flow.state(n), Mixed)), None)
            if number is not None and _bounds(first, x, count):
                is_bool = x.dtype.is_bool  # otherwise, the number without its bound
                tried.append((first, number, [x] * is_bool, {} if is_bool else {id(x): number}))
        shown = (op for op, x, *shift in tried if changes(*shift) and not is_row_wise(x))
        found = [*itertools.islice(shown, 1)]
        if not found:
            # One alone may not show itself, such as a sum of 0 that is divided by one of 0.
            others = [x for x in reductions if len(reductions) > 1 and not is_row_wise(x)]
            found = [x.op for x in others[:1] if others[1:] and changes(others, {})]
        for op in found:
            _LOG.warning(
                "%s reduces the rows of a replica or micro-batch (%s) for the loss. The loss of a row "
                "did not change with the other rows in any batch that ctl has tried; if it does in "
                "another one, the update depends on how the batch is split: %s.",
                random_search.place(op), op.type, _FIX,
            )  # fmt: skip


def _reduces(flow: RowFlow, tensor: tf.Tensor, count: int | None) -> bool:
    """Returns whether an op computes numbers from several rows, as far as the ops show."""
    op, inputs = tensor.op, [flow.state(x) for x in tensor.op.inputs]
    mixed = [x for x in inputs if isinstance(x, Mixed)]
    if tensor.dtype == tf.variant or op.type in _MOVING:
        return False
    if op.type in ops.ELEMENTWISE:  # pairs of rows
        return not mixed and bool(tensor.shape.rank) and [*tensor.shape].count(count) > 1
    if op.type not in _REDUCTIONS:  # or a histogram, whose size is a maximum over the rows
        has_rows = any(isinstance(x, Place) for x in inputs)
        return not mixed or (has_rows and mixed[0].op.type not in _MOVING)
    axes = tf.get_static_value(op.inputs[1])
    if axes is None or not op.inputs[0].shape.rank:
        return True
    sizes = [op.inputs[0].shape[axis] for axis in np.ravel(axes)]
    # Inner axes, or sizes such as that of the samples of each row.
    is_inner = mixed and 0 not in np.ravel(axes)
    return not is_inner and not (count and all(size and size % count for size in sizes))


def _is_users_gradient(op: Any) -> bool:
    """Returns whether an op has a gradient that the user has written by tf.custom_gradient."""
    if op.type != "IdentityN" or b"CustomGradient" not in op.node_def.attr["_gradient_op_type"].s:
        return False
    callers = (frame.filename for frame in reversed(op.traceback))
    caller = next((name for name in callers if _TENSORFLOW not in name), "")
    return not caller.startswith(str(FOLDER)) and _KERAS not in caller


def _is_own_gather(op: Any) -> bool:
    """Returns whether ctl puts rows into the slot of their replica, to gather them."""
    return any(frame.filename.endswith(_GATHER) for frame in op.traceback)


def _bounds(first: Any, tensor: tf.Tensor, count: int | None) -> bool:
    """Returns whether an op bounds a number of all rows, or compares it with a number.

    Whether there are rows at all, as of a mask, is compared with 0 or 1. If the `first` op that combined
    rows only moved them, an entry may be that of one row.
    """
    shape, is_bool = tensor.shape, tensor.dtype.is_bool
    may_have_rows = is_bool and shape.rank == 1 and first.type not in (*_MOVING, "TopKV2")
    is_number = shape.is_fully_defined() and all(size % (count or 1) for size in shape)
    constants = [tf.get_static_value(x) for x in tensor.op.inputs] if is_bool else []
    return (
        tensor.op.type in _BOUNDS and (is_number or (may_have_rows and shape.is_fully_defined()))
        and not any(x is not None and x in (0, 1) for x in constants if np.ndim(x) == 0)
    )  # fmt: skip


@functools.cache
def _warn(line: str) -> None:  # several trainers of a process, as of ctl check, have the same loss
    _LOG.warning("%s As long as one replica computes the batch at once, there is no split.", line)


def _describe_op(trace: Trace, flow: RowFlow, op: Any) -> str:
    """Names an op that combines rows, with the shapes that it broadcasts.

    Raises:
        UsageError: it combines labels [rows] and outputs [rows, 1], which is wrong on any split.
    """
    if op.type == "ConcatV2":
        return (
            "ConcatV2; for two views of each row, call the model once for each view, or use "
            "tf.repeat(x, 2, axis=0)"
        )
    operands = [x for x in op.inputs if isinstance(flow.state(x), Place)]
    if op.type not in ops.ELEMENTWISE or len(operands) != 2:
        return op.type
    shown = " and ".join(f"{_describe(x, trace)} {tuple(x.shape)}" for x in operands)
    low, high = sorted(operands, key=lambda x: x.shape.rank)
    is_pair = [_describe(x, trace) for x in operands].count(_OUTPUTS) == 1 and high.shape[-1] == 1
    if not is_pair or low.shape.rank == high.shape.rank or _inserts_axis(high):
        return f"{op.type} of {shown}"  # such as x[:, None] - x, the differences of all pairs
    fix = f"use {_describe(high, trace)}[{':, ' * (high.shape.rank - 1)}0]"
    raise UsageError(
        f"{random_search.place(op)}: {shown} broadcast to {tuple(op.outputs[0].shape)} ({op.type}), so "
        f"each row meets the other rows: {fix}."
    )


def _inserts_axis(tensor: tf.Tensor) -> bool:
    """Returns whether an op before a tensor, other than elementwise ones, keeps or inserts an axis."""
    op = tensor.op
    if op.type in ops.ELEMENTWISE:
        return any(_inserts_axis(x) for x in op.inputs if x.shape.rank == tensor.shape.rank)
    names = {"StridedSlice": "new_axis_mask", "Sum": "keep_dims", "Mean": "keep_dims"}
    inserts = op.type in names and op.get_attr(names[op.type])
    return bool(inserts) or op.type in ("ExpandDims", "Reshape")


def _describe(tensor: tf.Tensor, trace: Trace) -> str:
    """Names the origin of a tensor: the model, or an entry of the batch."""
    sources = list(ancestors(tensor))
    if any(x.op.type in ("ReadVariableOp", "ResourceGather") for x in sources):
        return _OUTPUTS
    batch = trace.inputs[0] if isinstance(trace.inputs, tuple) else trace.inputs
    entries = {id(x): name for name, x in batch.items()} if isinstance(batch, Mapping) else {}
    names = {entries[id(x)] for x in sources if id(x) in entries}
    return f'batch["{names.pop()}"]' if len(names) == 1 else "data"


def _check_equal(difference: loss_trace.TraceDifference | None, parts: str) -> None:
    if difference is None:
        return
    one, two = difference.values
    raise UsageError(
        f"{random_search.place(difference.op)} is {one} in one of the {parts} and {two} in another: "
        "code in Python, such as a counter, runs once for each of them, while the step is traced. Use "
        f"self.global_step, or a tf.Variable, {_ACCEPT}."
    )
