"""Rejects tensors that one replica or micro-batch leaves in an attribute, and another one reads.

The replicas of a process are threads with one set of Python objects. They take turns whenever they
communicate, so `self.hidden` may be the tensor of another replica by then.
"""

from collections.abc import Container, Iterable, Sequence
import functools
import operator
import re
from typing import Any

import tensorflow as tf

from ctl.built.built_step import BuiltStep
from ctl.built.observers import Observer
from ctl.configs.error_location import user_frame
from ctl.errors import UsageError
from ctl.graphs.assignments import READS, outermost
from ctl.graphs.dataflow import ancestors
from ctl.graphs.ops import SHAPES
from ctl.graphs.places import is_in_replica, place_of
from ctl.rows import row_mask
from ctl.rows.row_mask import Rows
from ctl.rows.trace import UpdateTrace, symbolic
from ctl.update.snapshot import handles

_FIX = (
    "they share the attributes of one Python object, so return it as an output of the model, or of "
    "forward, and read it from the outputs."
)
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
_REPLICA = re.compile(r"(.*/)?replica_\d+(?=/|$)")  # the name scope of all but the first replica
_BARRIER = "XlaOptimizationBarrier"  # its output i is its input i
_OUT_OF_SCOPE = "out of scope"  # of TensorFlow's error for a tensor of another graph


def explain(error: BaseException, loop: object) -> str:
    """Explains an error about a tensor of another graph in one line; "" for other errors."""
    text = str(error)
    if not isinstance(error, TypeError | ValueError) or _OUT_OF_SCOPE not in text:
        return ""
    place = user_frame([(name, int(line)) for name, line in _FRAME.findall(text)])
    return (
        f"A tensor {f'that {place} has computed' if place else 'of another function'} is read while a "
        f"function is traced, such as an evaluation: {_FIX}"
    )


class LeftTensors(Observer):
    """Searches what a replica reads in training steps and evaluations."""

    def __init__(self, step: BuiltStep):
        super().__init__(step)
        rows = row_mask.current()
        assert rows is not None and rows.graph is not None
        # Of those that have begun. A layer of a user may have such a name, too, in another scope.
        self._scopes: set[str] = getattr(rows.graph, "_ctl_scopes", set())
        scope = _REPLICA.match(rows.graph.get_name_scope())
        self._scopes.add(f"{scope[0]}/" if scope else "")
        rows.graph._ctl_scopes = self._scopes
        self._replica = self._replica_of(f"{rows.graph.get_name_scope()}/")
        # All replicas of the process that have begun: what one of them reads exists by then.
        self._graph = rows.graph
        self._traces = getattr(rows.graph, "_ctl_started", [])
        self._traces.append(rows.trace)
        rows.graph._ctl_started = self._traces

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Raises a UsageError if an op reads what another replica or micro-batch has computed."""
        own = {id(x) for x in symbolic(rows.trace.inputs)}
        self._others = {id(x) for trace in self._traces for x in symbolic(trace.inputs)} - own
        if self._others:
            self._check_replicas(operations, rows, own)
        for update in rows.trace.updates:
            if len(update.micro_batches) > 1:
                self._check_micro_batches(update)

    def _check_replicas(self, operations: Sequence[Any], rows: Rows, own: set[int]) -> None:
        # They are equal on all replicas, but a loss would not get the gradient of them, or of weights.
        equal = {id(x.output) for trace in self._traces for x in trace.global_values}
        parts = [part for update in rows.trace.updates for part in update.micro_batches]
        of_losses = {x.op for part in parts for x in ancestors(*part.losses)}
        trained = handles(self.step.update.variables.values())
        in_replica = functools.cache(is_in_replica)
        for op in operations:
            inputs = self._inputs_of_others(op)
            # The code of a merge_call, such as a reduction, runs in no replica.
            if inputs and in_replica(op):
                inputs = [x for x in inputs if id(x) in self._others or in_replica(x.op)]
                stop, weights = (own, trained) if op in of_losses else (own | equal, set())
                if self._reads_others(inputs, stop, weights):
                    _reject(op, "replica")

    def _inputs_of_others(self, op: Any) -> list[tf.Tensor]:
        """Returns what an op of this replica reads of others."""
        if self._replica_of(op.name) != self._replica:
            return []
        return [
            x for x in op.inputs
            if id(x) in self._others or self._replica_of(x.op.name) != self._replica
        ]  # fmt: skip

    def _reads_others(
        self, tensors: Sequence[tf.Tensor], stop: set[int], trained: set[int]
    ) -> bool:  # fmt: skip
        """Returns whether tensors are computed from rows of others, or from weights that are trained."""
        return any(
            id(x) in self._others
            or (x.op.type in READS and id(outermost(x.op.inputs[0])) in trained)
            for tensor in tensors
            for x in ancestors(tensor, stop=stop, through_shapes=False)
        )

    def _replica_of(self, name: str) -> str:
        """Returns the name scope of the replica that has created an op of a name."""
        name = name.replace("gradient_tape/", "")  # before the scope of the forward pass
        return max((scope for scope in self._scopes if name.startswith(scope)), key=len, default="")

    def _check_micro_batches(self, update: UpdateTrace) -> None:
        parts, users = update.micro_batches, _users(update)
        graph, complete = parts[0].losses[0].graph, (1 << len(parts)) - 1
        operations = graph.get_operations()
        end = update.operations if graph is self._graph else len(operations)
        late = dict.fromkeys(op for op in operations[end:] if op not in users)
        reached = _reach(update, operations, late)
        for op in operations:
            every, user = _union(reached.get(id(x), 0) for x in op.inputs), users.get(op, 0)
            # What two of them use is what one has left.
            if user.bit_count() == 1 and every & ~user and op.type != _BARRIER:
                self._reject_own(op)
        for i, part in enumerate(parts):
            for loss in part.losses:
                if reached[id(loss)] & ~(1 << i):
                    _reject(loss.op, "micro-batch")
        for op in late:  # of the update, which reads all micro-batches
            some = _union({reached.get(id(x), 0) for x in op.inputs} - {complete})
            if op.type not in SHAPES and some not in (0, complete):
                self._reject_own(op)

    def _reject_own(self, op: Any) -> None:
        if self._replica_of(op.name) == self._replica:
            _reject(op, "micro-batch")


def _reach(update: UpdateTrace, operations: Sequence[Any], late: Container[Any]) -> dict[int, int]:
    """Returns the id of each tensor -> the micro-batches that it depends on, as bits.

    Args:
        update: the update.
        operations: the ops of the graph of its micro-batches.
        late: those of the update that no micro-batch uses.
    """
    parts = enumerate(update.micro_batches)
    reached = {id(x): 1 << i for i, part in parts for x in part.rows}
    for op in operations:
        masks = [reached.get(id(x), 0) for x in op.inputs]
        every = (
            0 if op in late and op.type in SHAPES else _union(masks)
        )  # ctl counts the rows of each
        for i, output in enumerate(op.outputs):
            mask = masks[i] if op.type == _BARRIER else every
            reached[id(output)] = reached.get(id(output), 0) | mask
    return reached


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)


def _users(update: UpdateTrace) -> dict[Any, int]:
    """Returns the ops of losses and metrics, each with the micro-batches that use it, as bits."""
    users: dict[Any, int] = {}
    used = [[x.op for x in ancestors(*part.losses)] for part in update.micro_batches]
    for i, operations in [*enumerate(used), *enumerate(update.metrics)]:
        for op in operations:
            users[op] = users.get(op, 0) | 1 << i
    return users


def _reject(op: Any, part: str) -> None:
    raise UsageError(f"{place_of(op)} reads a tensor that another {part} has computed: {_FIX}")
