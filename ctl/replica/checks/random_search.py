"""Searches a traced step for random numbers that are not functions of the global batch.

The ops of the step, and of all functions that they call, are searched while the step is traced;
nothing is added to the graph. What ctl drew itself is recognized by its name (`philox.OP_NAME`).
"""

from collections.abc import Iterator
import contextlib
import itertools
import re
from typing import Any
import weakref

import tensorflow as tf

from ctl.configs.error_location import user_frame
from ctl.errors import UsageError
from ctl.replica.arithmetic.row_mask import Examples
from ctl.replica.checks.stateless_draws import Dataflow
from ctl.replica.graphs import random_ops, row_axis
from ctl.replica.random import philox
from ctl.replica.random.draws import Folded

_ACCEPT = "or accept it with allow_unkeyed_random=True (runtime.allow_unkeyed_random)"
_INITIALIZER = re.compile(r"(^|/)Initializer(_\d+)?/")
_REPLICA = re.compile(r"^replica_\d+(/|$)")
_MAX_CONSUMERS = 1_000

# One replica of each graph is enough: they run the same code.
_SEARCHED: "weakref.WeakSet[Any]" = weakref.WeakSet()


@contextlib.contextmanager
def search(rows: Examples, inputs: Any) -> Iterator[None]:
    """Searches the ops that the code inside the `with` block creates.

    Args:
        rows: the rows that the step computes.
        inputs: the tensors of the batch, before `preprocess`.

    Raises:
        UsageError: random numbers are drawn that depend on how the batch is split, or the backward
            pass draws or assigns again. The message names the user's line of code and what to write.
    """
    graph = rows.graph
    if (
        rows.allow_unkeyed or graph is None or graph in _SEARCHED
    ):  # nothing can be searched in eager execution
        yield
        return
    before = len(graph.get_operations())
    scope = tf.compat.v1.get_variable_scope()
    caching_device = scope.caching_device
    try:
        yield
    except BaseException:
        # After an error tf.map_fn and tf.scan leave their own, with which no model can be built.
        scope.set_caching_device(caching_device)
        raise
    _Search(rows, inputs).run(graph.get_operations()[before:])
    _SEARCHED.add(graph)


class _Search:
    """The state of one search.

    Attributes:
        flow: what depends on the batch.
    """

    def __init__(self, rows: Examples, inputs: Any):
        self.flow = Dataflow(
            [x for x in tf.nest.flatten(inputs) if tf.is_symbolic_tensor(x)],
            rows.count,
            rows.parts,
        )
        self._rows = rows
        # Function -> whether ctl draws in it.
        self._functions: dict[str, bool] = {}
        # The ops that assign each variable.
        self._assignments: dict[int, list[Any]] = {}

    def run(self, operations: list[Any]) -> None:
        """Raises a UsageError if an op, or an op of a called function, is not allowed."""
        self._contains_keyed(operations)
        self._check_recomputation()
        for draw in self._rows.folded:
            if not _confirmed(draw):
                raise UsageError(draw.problem)

    def _contains_keyed(self, operations: list[Any]) -> bool:
        """Checks ops; returns whether ctl draws in them."""
        keyed = False
        calls: set[str] = set()
        for op in operations:
            kind = op.type
            if kind in random_ops.RANDOM:
                keyed |= self._check_draw(op)
            elif kind in random_ops.PYTHON:
                raise UsageError(
                    f"{place(op)} runs Python code in the step (tf.py_function or tf.numpy_function), "
                    "whose random numbers cannot be checked: write it with TensorFlow's functions, do "
                    f"it in the input pipeline, {_ACCEPT}."
                )
            elif kind in random_ops.ASSIGNMENTS:
                self._assignments.setdefault(id(op.inputs[0]), []).append(op)
            elif kind in random_ops.FUNCTIONS:
                for name, graph in random_ops.called_graphs(op):
                    if name not in self._functions:
                        self._functions[name] = self._contains_keyed(graph.get_operations())
                    keyed |= self._functions[name]
                    if self._functions[name] and name in calls:
                        raise UsageError(
                            f"{place(op)} calls a tf.function twice in a step, and random numbers in "
                            "it would be the same in both calls: remove your own @tf.function, ctl "
                            "traces the step."
                        )
                    if kind in random_ops.CALLS:
                        calls.add(name)
        return keyed

    def _check_recomputation(self) -> None:
        """Rejects tf.recompute_grad of a layer that assigns, such as moving statistics, a second time.

        Draws in the backward pass are rejected by `draws`, or for their forward pass.
        """
        # Stacks take longer than the rest of the search, and an optimizer assigns a variable once.
        repeated = [ops for ops in self._assignments.values() if len(ops) > 1]
        for op in itertools.chain.from_iterable(repeated):
            if any(frame.name == "inner_recompute_grad" for frame in op.traceback):
                raise UsageError(
                    f"{place(op)} assigns a variable in the backward pass, for the second time in the "
                    f"step: use ctl.recompute instead of tf.recompute_grad, {_ACCEPT}."
                )

    def _check_draw(self, op: Any) -> bool:
        """Checks a random op; returns whether it is ctl's own."""
        if philox.OP_NAME in op.name:
            return True
        if _INITIALIZER.search(op.name):  # a variable's initializer, which runs once
            return False
        if op.type in random_ops.STATELESS and not self.flow.differs_between_splits(op):
            return False
        raise UsageError(
            f"{place(op)} draws random numbers ({op.type}) that depend on how the batch is split: use "
            f"{random_ops.suggestion(op, self.flow.counts)}, {_ACCEPT}."
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
                if row_axis.entries_per_row(other, draw.count) == size // draw.count:
                    return True
            for output in op.outputs:
                if output.shape.rank and output.shape[0] == size and id(output) not in derived:
                    derived.add(id(output))
                    queue.append(output)
    return False


def place(op: Any) -> str:
    """Names the layer and the user's line of code that created an op."""
    line = user_frame([(frame.filename, frame.lineno) for frame in op.traceback])
    # Functions such as tf.random.uniform add a scope of their own.
    scope = _REPLICA.sub("", "/".join(op.name.split("/")[:-2]))
    if line is None:
        return f"Layer {scope or op.name}"
    return f"{line} (in {scope})" if scope else line
