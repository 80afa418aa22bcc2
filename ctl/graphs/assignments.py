"""Lists the variables that the code of a step assigns, from the graph, while the step is traced."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.configs.error_location import user_frame
from ctl.graphs import dataflow, ops

# In the name of each op by which an optimizer assigns, in a conditional of its own if it may skip.
OPTIMIZER_UPDATE = "ctl_update"
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


class Assignment(NamedTuple):
    """An op that assigns a variable.

    Attributes:
        op: the op.
        handle: the handle of the variable; on several replicas, the handle of one replica's copy.
        calls: the ops that call the functions which contain `op`, outermost first.
    """

    op: tf.Operation
    handle: tf.Tensor
    calls: tuple[tf.Operation, ...]

    @property
    def place(self) -> str:
        """Names the user's line of code, or the layer."""
        line = user_frame([(frame.filename, frame.lineno) for frame in self.op.traceback])
        return line or f"Layer {self.op.name.rpartition('/')[0] or self.op.name}"

    def depends_on(self, sources: Iterable[tf.Tensor]) -> bool:
        """Returns whether the value, or the assignment itself, depends on one of the sources."""
        sources = list(sources)
        values = [tensor for tensor in self.op.inputs if tensor.dtype != tf.resource]
        for call in self.calls:
            if call.type in ("If", "StatelessIf", "Case", "StatelessCase"):
                values.append(call.inputs[0])
            else:  # the arguments of a loop or a function are not followed one by one
                values += [tensor for tensor in call.inputs if tensor.dtype != tf.resource]
        return any(dataflow.depends_on(value, sources) for value in values)


def find_assignments(
    operations: Sequence[tf.Operation], calls: tuple[tf.Operation, ...] = ()
) -> Iterator[Assignment]:
    """Yields the assignments among ops, and in the functions that they call, but no optimizer's.

    Args:
        operations: ops of a graph.
        calls: the ops that call the function which contains `operations`, outermost first.
    """
    for op in operations:
        if OPTIMIZER_UPDATE in op.name:
            continue
        if op.type in ops.FUNCTIONS:
            for _, graph in ops.called_graphs(op):
                yield from find_assignments(graph.get_operations(), (*calls, op))
        elif op.type.startswith(("Assign", "Resource")) and op.type not in READS:
            for tensor in op.inputs:
                if tensor.dtype == tf.resource:
                    yield Assignment(op, outermost(tensor), calls)


def read_handles(*values: Any) -> set[int]:
    """Returns the ids of the handles of the variables that tensors are computed from."""
    return {id(outermost(x)) for x in dataflow.ancestors(*values) if x.dtype == tf.resource}


def outermost(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor outside of all functions that an input of a function stands for."""
    while tf.is_symbolic_tensor(tensor):
        outer = dataflow.captured(tensor)
        if outer is None:
            break
        tensor = outer
    return tensor
