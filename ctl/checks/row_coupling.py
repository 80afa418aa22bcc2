"""Rejects losses in which a row of the batch depends on other rows of its replica or micro-batch.

The ops from the batch to the losses are searched while the step is traced; nothing is added to the
graph. An op that may combine rows is a suspect. The losses are then computed with other rows exchanged,
before the first step, for batches of the whole epoch and for rows that are made up from them: if the
loss of a row changes, it is rejected. It must not change either if the replica begins one row later, as
it does on another split. The batches of steps 1, 2, 4, ... are computed in the same way, after these
steps. A trace with one row cannot show that, so the step is then traced again with several.
"""

from collections.abc import Sequence
import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ctl.built.observers import Observer
from ctl.built.state import assignable, state_of
from ctl.checks import loss_trace
from ctl.checks.probe_error import ProbeError
from ctl.checks.read_batches import ReadBatch, read_existing
from ctl.checks.row_flow import RowFlow
from ctl.checks.row_rules import Place
from ctl.checks.searched_trace import ACCEPT, COMBINES, COUNT_FIX, FIX, SearchedTrace, Suspect
from ctl.configs.error_location import name_function
from ctl.errors import UsageError
from ctl.graphs import ops
from ctl.graphs.dataflow import ancestors, outer_tensor
from ctl.graphs.places import place_of
from ctl.hardware import devices, strategies
from ctl.rows.row_mask import Rows
from ctl.rows.trace import UpdateTrace, symbolic

if TYPE_CHECKING:
    from ctl.checks.one_replica import Compute

_LOG = logging.getLogger("ctl")
_PARTS = (0.25, 0.5, 0.75, 0.99)  # of the epoch, whose batches are read besides the next one
_ROWS = 4  # of a micro-batch, if the step is traced again
_HIDING = ("StopGradient", "IdentityN")  # tf.custom_gradient is the second
_COUNTS = "uses the number of replicas in the update"
_UPDATES = "computes another update on one replica with all rows"


class RowCoupling(Observer):
    """Searches the losses of training steps."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Raises a UsageError if the loss of a row depends on other rows of the replica."""
        step, plan = self.step, self.step.plan
        if rows.earlier is None and not plan.options.allow_row_coupling:
            read = step.first_batch
            batches: list[ReadBatch] = [read, *(functools.partial(read, part) for part in _PARTS)]
            owner: Any = step.attributes.owner
            # Numbers of rows in other losses are found before the first step.
            others = []
            if plan.own_replica_step:  # of a trainer, or the losses of several optimizers
                place = name_function(getattr(owner, "replica_step", None) or owner.loss_fn)
                others = [Suspect(place, _UPDATES, COUNT_FIX, is_seen=False)]
            place = ""
            if plan.layout.replicas > 1:
                from ctl.checks import replica_count

                place = next(iter(rows.trace.call.get("replica_count", ())), "")
                if not place and any(replica_count.find_stored(step, 1)):
                    place = f"{name_function(step.hooks.per_example_loss)}, a weight or a penalty"
            counted = Suspect(place, _COUNTS, COUNT_FIX) if place else None
            # The code may call an optimizer by itself.
            own = [v for each in step.attributes.optimizers() for v in each.variables]
            state = [*state_of(step.attributes), *(v for v in own if isinstance(v, tf.Variable))]
            held = assignable(step.attributes)
            found = SearchedTrace(
                rows.trace, plan.layout.replicas, rows.micro_batches, batches, rows.allow_unkeyed,
                again=step.repeated, state=state, held=[*state, *held.once, *held.summed],
                parts=plan.options.logical_shards or 1,
            )  # fmt: skip

            def compute(batch: Any, replicas: int) -> None:
                from ctl.checks import replica_count  # for code that is traced again

                with replica_count.changing(step, replicas):
                    step.compute(batch)

            search(found, rows, compute, others, counted)


def search(
    found: SearchedTrace,
    rows: Rows,
    compute: "Compute",
    others: Sequence[Suspect] = (),
    counted: Suspect | None = None,
) -> None:
    """Searches the losses that a replica has traced.

    Args:
        found: the trace; gets the checks to repeat for other batches, where the ops do not show that
            rows are independent.
        rows: the rows of the replica.
        compute: what was traced, as a function of a batch and of the number of replicas that it sees.
        others: what is compared with one replica in any case.
        counted: what may use the number of replicas.

    Raises:
        UsageError: the loss of a row depends on other rows of the replica, or the replicas compute
            different functions of their rows. The message names the user's line of code.
    """
    trace = rows.trace
    if not symbolic(trace.inputs):
        return
    # On several replicas the first position is computed from the rows of all.
    numbers = symbolic([rows.first_row, rows.step])
    found.first = {id(x): np.zeros([], x.dtype.as_numpy_dtype) for x in numbers}
    trace.positions.extend(symbolic([rows.first_row]))
    context: Any = tf.distribute.get_replica_context()
    found.number = int(tf.get_static_value(context.replica_id_in_sync_group) or 0)
    # The graph keeps the traces, because it also keeps their tensors.
    searches = trace.call.setdefault("searches", [])
    searches.append(found)
    number = None
    if found is searches[0]:
        _search_first(found, rows, compute)
    else:  # another replica of this process, in the same graph
        distance = len(searches) - 1
        difference, number = loss_trace.compare_replicas(searches[0].trace, trace, distance)
        _check_equal(difference, "replicas")
    if not found.is_split:
        return
    from ctl.checks import one_replica, suspects  # with which the replicas are compared

    found.suspects += [] if number is None else [suspects.suspect_number(number)]
    if len(searches) == _count_traces():
        known = [suspect for each in reversed(searches) for suspect in each.suspects]
        # Those that the trace does not show are the last.
        known = sorted([*known, *suspects.find_in_state(searches[0])], key=lambda x: not x.is_seen)
        one_replica.check(searches, rows, compute, [*known, *others], counted)


def _count_traces() -> int:
    """Returns how many replicas of this process trace a step."""
    strategy = tf.distribute.get_strategy()
    is_one = strategies.spec_of(strategy).tpu  # one trace serves all of them
    return 1 if is_one else len(devices.replica_devices(strategy))


def _search_first(found: SearchedTrace, rows: Rows, compute: "Compute") -> None:
    """Searches the losses that the first replica has traced."""
    try:
        _check_updates(found)
    except ProbeError as unknown:
        try:
            _check_again(found, rows, compute)
        except ProbeError as error:
            op = error.op or unknown.op
            if op is not None and found.is_split:
                _LOG.warning(
                    "%s may combine rows of the same replica or micro-batch (%s), which is not known: "
                    "%s. If it does, the update depends on how the batch is split, which `ctl check` "
                    "measures.",
                    place_of(op), op.type, error,
                )  # fmt: skip


def _check_again(found: SearchedTrace, rows: Rows, compute: "Compute") -> None:
    """Checks the losses of a step that is traced again, with several rows in each micro-batch."""
    parts = rows.micro_batches
    count = _ROWS * parts
    with tf.init_scope():
        batch = read_existing(found.batches[0], count, rows.trace)
        batch = tf.nest.map_structure(lambda x: x[:count], batch)
    from ctl.checks import one_replica

    trace = one_replica.retrace(rows, batch, compute, count=count, parts=parts)
    again = dataclasses.replace(
        found, trace=trace, batches=[lambda: (batch, None)], first={}, is_alone=True
    )  # fmt: skip
    _check_updates(again)


def _check_updates(searched: SearchedTrace) -> None:
    """Raises a UsageError, or a ProbeError if the trace cannot show what the losses are."""
    for update in searched.trace.updates:
        _check_update(searched, update)
        if not loss_trace.has_equal_parts(update):
            raise ProbeError("no two micro-batches have the same number of rows")
    _check_equal(loss_trace.compare_micro_batches(searched.trace), "micro-batches")


def _check_update(searched: SearchedTrace, update: UpdateTrace) -> None:
    trace, micro_batches = searched.trace, searched.micro_batches
    tensors = symbolic(trace.inputs)
    positions = [x for x in trace.positions if x.shape.rank]
    batch = {id(x): Place(0) for x in (*tensors, *positions)}
    clean = [id(value.output) for value in trace.global_values]
    count = tensors[0].shape[0] if tensors[0].shape.rank else None

    def check_rows(flow: RowFlow, values: Any, count: int | None, micro_batches: int) -> None:
        mixed = flow.suspects(values)
        if not mixed:
            if count == 1 and trace.global_values:
                raise ProbeError("a micro-batch has one row")
            return
        # They compute the losses of other rows, which the ops of most losses make unnecessary.
        from ctl.checks import hidden_reductions, row_dependence

        search = row_dependence.RowDependence(
            searched, update, flow, values, mixed, count, micro_batches=micro_batches
        )  # fmt: skip
        if search.run():
            # Other rows of the replica change nothing, but fewer rows may, such as half of them.
            op = mixed[0][1]
            use = f"{COMBINES} ({op.type})"
            searched.suspects.append(Suspect(place_of(op), use, FIX, is_seen=False))
            hidden_reductions.warn(search)

    # The undivided batch, up to what `preprocess` and `sample_weight` returned.
    prepared = RowFlow(batch, count=count, clean=clean, row_wise=trace.row_wise)
    check_rows(prepared, update.inputs, count, 1)

    part = update.micro_batches[0]
    leading = {id(x): Place(0) for x in part.rows if x.shape.rank}
    rows = part.size if isinstance(part.size, int) else None

    def resolve(tensor: tf.Tensor) -> tf.Tensor | None:
        alias = update.aliases.get(id(tensor))
        return outer_tensor(tensor) if alias is None else alias

    losses = RowFlow(
        {**batch, **leading}, count=rows, clean=clean, resolve=resolve, row_wise=trace.row_wise
    )
    check_rows(losses, part.losses, rows, micro_batches)
    if searched.is_split:
        from ctl.checks import suspects

        prepared_values = [*update.inputs, *symbolic(update.conditions)]
        searched.suspects += suspects.find(searched, prepared, prepared_values)
        searched.suspects += suspects.find(searched, losses, part.losses, part.rows)
    reached = ops.with_called(x.op for x in ancestors(*part.losses))
    hides = any(op.type in _HIDING for op in reached)
    if hides or any(update.penalties):
        from ctl.checks import row_sums

        row_sums.check_penalties(searched, update, losses, rows)
        row_sums.check_gradients(searched, update, losses)


def _check_equal(difference: loss_trace.TraceDifference | None, parts: str) -> None:
    if difference is None:
        return
    one, two = difference.values
    raise UsageError(
        f"{place_of(difference.op)} is {one} in one of the {parts} and {two} in another: "
        "code in Python, such as a counter, runs once for each of them, while the step is traced. Use "
        f"self.global_step, or a tf.Variable, {ACCEPT}."
    )
