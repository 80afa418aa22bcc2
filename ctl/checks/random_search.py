"""Searches a traced step for random numbers that are not functions of the global batch.

`search` searches the ops of the step, and of all functions that they call, while the step is traced;
nothing is added to the graph. What ctl drew itself is recognized by its name (`ops.KEYED_BITS`).
"""

from collections.abc import Collection, Sequence
import functools
import itertools
import re
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ctl.built.observers import Observer
from ctl.errors import UsageError
from ctl.graphs import ops
from ctl.graphs.assignments import OPTIMIZER_UPDATE
from ctl.graphs.dataflow import ancestors, find_fold
from ctl.graphs.places import place_of
from ctl.rows.row_mask import Rows
from ctl.rows.trace import Folded, symbolic
from ctl.update import gradients, update

if TYPE_CHECKING:
    from ctl.checks.draw_flow import DrawFlow

_ACCEPT = (
    "or accept it by `with ctl.random.unkeyed():` around it, or everything of this kind with "
    "allow_unkeyed_random=True (runtime.allow_unkeyed_random)"
)
_KEYED = "`with ctl.random.keyed():` around the code of a library, "
_KEYED_OPS = re.compile(
    r"(Stateless)?(Random)?(StandardNormal|Normal|Uniform|UniformInt|TruncatedNormal|Multinomial)(V2)?"
)
_INITIALIZER = re.compile(r"(^|/)Initializer(_\d+)?/")
_MAX_CONSUMERS = 1_000


class RandomOps(Observer):
    """Searches the random ops of a step."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Raises a UsageError if random numbers depend on how the batch is split."""
        # One replica of each call is enough: they run the same code.
        if not rows.allow_unkeyed and "random" not in rows.trace.call:
            search(operations, rows)
            rows.trace.call["random"] = True


def search(operations: Sequence[Any], rows: Rows) -> None:
    """Searches the ops of a trace.

    Args:
        operations: the ops.
        rows: the rows that the step computes, with the tensors of the batch before `preprocess`.

    Raises:
        UsageError: random numbers are drawn that depend on how the batch is split, or the backward
            pass draws or assigns again. The message names the user's line of code and what to write.
    """
    _RandomSearch(rows).run(operations)


class _RandomSearch:
    """The state of one search."""

    def __init__(self, rows: Rows):
        self._rows = rows
        # Function -> whether ctl draws in it.
        self._functions: dict[str, bool] = {}
        self._operations: Sequence[Any] = ()
        # The ops that assign each variable.
        self._assignments: dict[int, list[Any]] = {}

    @functools.cached_property
    def flow(self) -> "DrawFlow":
        """What depends on the batch."""
        from ctl.checks.draw_flow import DrawFlow  # for a step that draws

        rows = self._rows
        return DrawFlow(symbolic(rows.trace.inputs), rows.count, rows.micro_batches)

    def run(self, operations: Sequence[Any]) -> None:
        """Raises a UsageError if an op, or an op of a called function, is not allowed."""
        self._operations = operations
        self._contains_keyed(operations)
        self._check_recomputation()
        for draw in self._rows.trace.folded:
            if not _confirmed(draw):
                raise UsageError(draw.problem)

    def _contains_keyed(self, operations: Sequence[Any]) -> bool:
        """Checks ops; returns whether ctl draws in them."""
        keyed = False
        calls: set[str] = set()
        for op in operations:
            kind = op.type
            if op in getattr(op.graph, "_ctl_accepted", ()):
                continue
            if ops.SHARED_NUMBERS in op.name and self.flow.may_be_of_rows(op.outputs[0]):
                raise UsageError(
                    f"{place_of(op)} draws random numbers of shape {op.outputs[0].shape} in ctl.random."
                    "keyed(), the same on every replica, and combines them with rows: draw [rows, ...] "
                    "numbers, or use ctl.random with per_row=N."
                )
            if kind in ops.RANDOM:
                keyed |= self._check_draw(op)
            elif kind in ops.PYTHON:
                raise UsageError(
                    f"{place_of(op)} runs Python code in the step (tf.py_function or tf.numpy_function) "
                    "whose random numbers cannot be checked: write it with TensorFlow's functions, do "
                    f"it in the input pipeline, {_ACCEPT}."
                )
            elif kind in ops.ASSIGNMENTS:
                self._assignments.setdefault(id(op.inputs[0]), []).append(op)
            elif kind in ops.FUNCTIONS:
                for name, graph in ops.called_graphs(op):
                    if name not in self._functions:
                        self._functions[name] = self._contains_keyed(graph.get_operations())
                    keyed |= self._functions[name]
                    if self._functions[name] and name in calls:
                        raise UsageError(
                            f"{place_of(op)} calls a tf.function twice in a step, and random numbers in "
                            "it would be the same in both calls: remove your own @tf.function, ctl "
                            "traces the step."
                        )
                    if kind in ops.CALLS:
                        calls.add(name)
        return keyed

    def _used(self) -> Collection[Any]:
        """Returns the ops that the results of the step, its losses or its variables depend on."""
        if self._rows.trace.results is None:
            return self._operations
        effects = [
            x for op in self._operations for x in op.inputs
            if op.op_def.is_stateful and op.type not in ops.RANDOM
        ]  # fmt: skip
        return {
            x.op for x in ancestors(*effects, *self._local(), *symbolic(self._rows.trace.results))
        }

    def _local(self) -> list[tf.Tensor]:
        """Returns what the step computes before a reduction over the replicas."""
        trace = self._rows.trace
        updates = [
            [[part.losses for part in each.micro_batches], each.penalties, each.gradients]
            for each in trace.updates
        ]
        metrics = [
            x for each in trace.updates for part in each.metrics for op in part for x in op.inputs
        ]
        return symbolic([updates, trace.weights, metrics])

    def _is_in_update(self, op: Any) -> bool:
        """Returns whether an op is in the update, in which every value is that of the global batch.

        There, a size that is a number of rows is so by coincidence.
        """
        is_in_update = OPTIMIZER_UPDATE in op.name or any(
            frame.filename == gradients.__file__
            or (frame.filename == update.__file__ and frame.name == "_finish")
            for frame in op.traceback
        )
        return is_in_update and op not in {x.op for x in ancestors(*self._local())}

    def _check_recomputation(self) -> None:
        """Rejects tf.recompute_grad of a layer that assigns, such as moving statistics, a second time.

        Draws in the backward pass are rejected by `draws`, or for their forward pass.
        """
        # Stacks take longer than the rest of the search, and an optimizer assigns a variable once.
        repeated = [each for each in self._assignments.values() if len(each) > 1]
        for op in itertools.chain.from_iterable(repeated):
            if any(frame.name == "inner_recompute_grad" for frame in op.traceback):
                raise UsageError(
                    f"{place_of(op)} assigns a variable in the backward pass, for the second time in "
                    f"the step: use ctl.recompute instead of tf.recompute_grad, {_ACCEPT}."
                )

    def _check_draw(self, op: Any) -> bool:
        """Checks a random op; returns whether it is ctl's own."""
        if ops.KEYED_BITS in op.name:
            return True
        if ops.CLOCK in op.name or _INITIALIZER.search(op.name):  # of a variable: it runs once
            return False
        if op.type in ops.STATELESS and (
            not self.flow.differs_between_splits(op)
            or (not self.flow.shows_split(op) and self._is_in_update(op))
        ):
            return False
        if op.graph is self._rows.graph and op not in self._used():
            return False
        raise UsageError(
            f"{place_of(op)} draws random numbers ({op.type}) that depend on how the batch is split: "
            f"use {ops.suggestion(op, self.flow.counts)}, "
            f"{_KEYED * bool(_KEYED_OPS.fullmatch(op.type))}{_ACCEPT}."
        )


def _confirmed(draw: Folded) -> bool:
    """Returns whether a draw with several entries per row is combined with a tensor of that fold."""
    size = draw.bits.shape[0]
    derived = {id(draw.bits)}
    queue = [draw.bits]
    while queue and len(derived) < _MAX_CONSUMERS:
        tensor = queue.pop(0)
        for op in tensor.consumers():
            for other in op.inputs:
                if id(other) in derived or not other.shape.rank or other.shape[0] != size:
                    continue
                if find_fold(other, draw.count) == draw.fold:
                    return True
            for output in op.outputs:
                if output.shape.rank and output.shape[0] == size and id(output) not in derived:
                    derived.add(id(output))
                    queue.append(output)
    return False
