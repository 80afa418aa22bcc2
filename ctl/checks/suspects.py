"""Finds what may make an update depend on the split although no row of a replica depends on the others.

A collective may get what a replica has already combined, such as the mean of its own maximum: its
result is equal on all replicas, and yet depends on how the batch is split. The number of a replica may
do the same, a number of rows, a gradient that the user has written, and a variable that the step
assigns. The ops of a trace show these, but not whether the update is wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
import os
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.checks import local_state, loss_trace
from ctl.checks.row_flow import Mixed, RowFlow, is_normalization
from ctl.checks.row_rules import Place
from ctl.checks.searched_trace import COUNT_FIX, FIX, PLACE_FIX, SearchedTrace, Suspect, reject
from ctl.graphs.assignments import OPTIMIZER_UPDATE, READS, Assignment, find_assignments, outermost
from ctl.graphs.dataflow import ancestors
from ctl.graphs.places import place_of
from ctl.rows.trace import GlobalValue, Trace, UpdateTrace, symbolic
from ctl.update.snapshot import handles
from ctl.version import FOLDER

_COMBINES = "combines rows of the same replica before a collective combines the replicas"
_COUNTS = "is a number from which one replica with all rows gets other losses"
_COLLECTS = (
    "collects values of all replicas, from which one replica with all rows gets other losses"
)
_GRADIENT = "has a gradient of tf.custom_gradient that one replica with all rows computes otherwise"
_ASSIGNS = (
    "assigns {}, which updates read, a value that one replica with all rows computes otherwise"
)
_SHARES = "draws the same numbers for the rows of each replica, and others for those of one"
_SHARES_FIX = "leave out shared=True where axis 0 holds the rows"
_UPDATES = "updates {} otherwise than one replica with all rows"
_UPDATES_FIX = (
    "call self.minimize instead, which divides by the weight of the global batch, or compute it from "
    "the rows of all, by ctl.replica.all_gather(rows)"
)
_ASSIGNS_FIX = (
    "compute it from the rows of all, by ctl.replica.all_gather(rows), and leave numbers of replicas "
    "and of rows out"
)
_GATHER, _ROW_RANGE = (os.path.join("ctl", "rows", x) for x in ("gather.py", "row_mask.py"))
_SNAPSHOT = os.path.join("ctl", "update", "snapshot.py")
_TENSORFLOW, _KERAS = (os.path.join("site-packages", x) for x in ("tensorflow", "tf_keras"))


def find(
    searched: SearchedTrace,
    flow: RowFlow,
    values: Sequence[tf.Tensor],
    micro_batch: Sequence[tf.Tensor] = (),
) -> Iterator[Suspect]:
    """Yields what may depend on the split although no row of a replica depends on the others.

    Args:
        searched: the trace.
        flow: finds where rows are combined.
        values: the losses, or what `preprocess` and `sample_weight` returned.
        micro_batch: the rows of a micro-batch, whose losses these are.

    Raises:
        UsageError: a collective has rows of one micro-batch only.
    """
    reached = [*ancestors(*values)]
    ids = {id(x) for x in reached}
    collectives = [x for x in searched.trace.global_values if id(x.output) in ids]
    yield from _find_combined(searched, flow, collectives, micro_batch)
    number = find_number(searched, values)
    if number is not None:
        yield suspect_number(number)
    for x in reached:
        if is_users_gradient(x.op):
            yield Suspect(place_of(x.op), _GRADIENT, COUNT_FIX)
        if is_count(x):
            yield Suspect(place_of(x.op), _COUNTS, COUNT_FIX)
    for x in searched.trace.shared:
        if id(x) in ids:
            yield Suspect(place_of(x.op), _SHARES, _SHARES_FIX, is_seen=False)
    for value in collectives:
        if not is_known(value) and not _is_own_gather(value.local.op):
            # It is called where no op is made, but its result is used on the user's line, or near it.
            op = next(iter(value.output.consumers()), value.local.op)
            yield Suspect(place_of(op), _COLLECTS, FIX)


def _find_combined(
    searched: SearchedTrace,
    flow: RowFlow,
    collectives: Sequence[GlobalValue],
    micro_batch: Sequence[tf.Tensor],
) -> Iterator[Suspect]:
    """Yields the collectives that get what a replica has combined."""
    parts = {id(x) for x in micro_batch if searched.micro_batches > 1}
    for value in collectives:
        state, op = flow.state(value.local), value.local.op
        combines = False
        if isinstance(state, Mixed) and not _is_own_gather(state.op):
            combines, op = True, state.op
        is_part = any(id(x) in parts for x in ancestors(value.local)) if parts else False
        if is_part and (combines or value.gathered):
            reject(place_of(op), _COMBINES, FIX, split=True)
        if combines:
            yield Suspect(place_of(op), _COMBINES, FIX)


def find_in_state(searched: SearchedTrace) -> Iterator[Suspect]:
    """Yields the assigned variables that may depend on the split: trained, or read by updates."""
    trace, tensors = searched.trace, symbolic(searched.trace.inputs)
    operations = tensors[0].graph.get_operations()
    state: list[Any] = [*searched.state, *_others(operations, searched.held)]
    found = assigned(trace, state)
    searched.state = [None] * len(state)
    if not found:
        return
    updates = [x for op in operations if OPTIMIZER_UPDATE in op.name for x in op.inputs]
    updates += [*updated_values(trace), *symbolic([each.inputs for each in trace.updates])]
    trained = {i for i in found if state[i].trainable}
    read = _read(state, found, trained, updates)
    flow = RowFlow(
        {id(x): Place(0) for x in tensors},
        count=tensors[0].shape[0],
        clean=[id(x.output) for x in trace.global_values],
        row_wise=trace.row_wise,
    )
    for i in sorted(read, key=lambda i: i not in trained):
        searched.state[i] = state[i]
        values = [x for each in found[i] for x in values_of(each)]
        causes = [x for x in find(searched, flow, values) if x.use == _COMBINES]
        # An optimizer assigns what it reads of its own variables.
        sources = [i, *sorted(_read(state, found, {i}) - {i})]
        places = (local_state.place_of_value(found[j][0]) for j in sources)
        place = next((x for x in places if not x.startswith("Layer")), "The step")
        use, fix = (_UPDATES, _UPDATES_FIX) if i in trained else (_ASSIGNS, _ASSIGNS_FIX)
        causes.append(Suspect(place, use.format(state[i].name), fix))
        searched.causes = dict.fromkeys(sources, causes[0]) | searched.causes
        yield from causes


class _Copy(NamedTuple):
    """A replica's copy of a variable that the owner of the step does not hold."""

    handle: tf.Tensor
    name: str = "a variable"
    trainable: bool = False


def _others(operations: Sequence[tf.Operation], held: Sequence[Any]) -> list[_Copy]:
    """Returns the copies that ops assign of variables that the owner of the step does not hold."""
    known = handles(held)
    found = {id(x.handle): x.handle for x in find_assignments(operations)}
    return [_Copy(handle) for key, handle in found.items() if key not in known]


def suspect_number(op: Any) -> Suspect:
    """Returns the suspect that is the number of a replica."""
    return Suspect(place_of(op), "uses the number of the replica", PLACE_FIX)


def _is_own_gather(op: Any) -> bool:
    """Returns whether ctl puts rows into the slot of their replica, to gather them."""
    return any(frame.filename.endswith(_GATHER) for frame in op.traceback)


def find_number(searched: SearchedTrace, values: Sequence[tf.Tensor]) -> Any | None:
    """Returns the number of the replica that values contain, other than in ctl's positions."""
    trace = searched.trace
    known = [*trace.positions, *(each.output for each in trace.global_values)]
    known += symbolic([part.first_row for update in trace.updates for part in update.micro_batches])
    sources = ancestors(*values, stop={id(x) for x in known})
    return next((x.op for x in sources if loss_trace.is_replica_number(x.op)), None)


def is_known(value: GlobalValue) -> bool:
    """Returns whether a value is statistics, or numbers of rows, whose parts ctl adds up."""
    ends = value.local.op, value.output.op
    return is_normalization(ends[0]) or any(caller_of(op).endswith(_ROW_RANGE) for op in ends)


def is_count(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is perhaps a number of rows, as a factor of a loss."""
    is_number = tensor.op.type == "Cast" and tensor.shape.rank == 0 and tensor.dtype.is_floating
    if not is_number or not tensor.op.inputs[0].dtype.is_integer or not is_users(tensor.op):
        return False
    sources = ancestors(tensor, through_shapes=False)
    return not any(x.op.type in (*READS, "Placeholder") for x in sources)


def is_users_gradient(op: Any) -> bool:
    """Returns whether an op has a gradient that the user has written by tf.custom_gradient."""
    if op.type != "IdentityN" or b"CustomGradient" not in op.node_def.attr["_gradient_op_type"].s:
        return False
    return is_users(op)


def is_users(op: Any) -> bool:
    """Returns whether the user's code has called TensorFlow to create an op."""
    caller = caller_of(op)
    return not caller.startswith(str(FOLDER)) and _KERAS not in caller


def caller_of(op: Any) -> str:
    """Returns the file of the code that has called TensorFlow to create an op."""
    callers = (frame.filename for frame in reversed(op.traceback))
    return next((name for name in callers if _TENSORFLOW not in name), "")


def assigned(trace: Trace, state: Sequence[tf.Variable | None]) -> dict[int, list[Assignment]]:
    """Returns the number of each variable that the code assigns -> the assignments, in order."""
    owners = {key: i for i, v in enumerate(state) if v is not None for key in handles([v])}
    found: dict[int, dict[int, list[Assignment]]] = {}  # of each copy
    for each in find_assignments(symbolic(trace.inputs)[0].graph.get_operations()):
        is_own = caller_of(each.op).endswith(_SNAPSHOT)  # after a step that is skipped
        if id(each.handle) in owners and not each.calls and not is_own:
            copies = found.setdefault(owners[id(each.handle)], {})
            copies.setdefault(id(each.handle), []).append(each)
    return {i: next(iter(copies.values())) for i, copies in found.items()}


def values_of(assignment: Assignment) -> list[tf.Tensor]:
    """Returns what an op assigns, and where."""
    return [x for x in assignment.op.inputs if x.dtype != tf.resource]


def _read(
    state: Sequence[tf.Variable],
    found: Mapping[int, Sequence[Assignment]],
    first: set[int],
    tensors: Sequence[tf.Tensor] = (),
) -> set[int]:
    """Returns the numbers of assigned variables that tensors, `first` or one of these read."""
    copies = {i: handles([state[i]]) for i in found}
    read, new, pending, unused = set[int](), first, [*tensors], set[int]()
    while new or pending:
        read |= new
        pending += [x for i in new for each in found[i] for x in values_of(each)]
        for op in {x.op for x in ancestors(*pending)}:
            # In training it gets the moving statistics, and does not use them.
            if op.type.startswith("FusedBatchNormV") and op.get_attr("is_training"):
                unused |= {id(x) for x in op.inputs[3:5]}
        reached = ancestors(*pending, stop=unused)
        used = {id(outermost(x)) for x in reached if x.dtype == tf.resource}
        new, pending = {i for i, keys in copies.items() if keys & used} - read, []
    return read


def losses_of(trace: Trace) -> list[tf.Tensor]:
    """Returns the losses of all updates and micro-batches."""
    return [x for each in trace.updates for part in each.micro_batches for x in part.losses]


def updated_values(trace: Trace) -> list[tf.Tensor]:
    """Returns the losses and gradients of a trace, and the arguments of functions that compute them."""
    updates = [(each.gradients, [*each.aliases.values()]) for each in trace.updates]
    return symbolic([losses_of(trace), updates, [*map(conditions_of, trace.updates)]])


def conditions_of(update: UpdateTrace) -> list[tf.Tensor]:
    """Returns the conditions of an update, or the numbers that they compare: they may decide alike."""
    compared = [
        [x for x in condition.op.inputs if x.dtype.is_floating] or [condition]
        for condition in symbolic(update.conditions)
    ]
    return [x for each in compared for x in each]
