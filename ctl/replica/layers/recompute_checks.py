"""Lists the tensors that a recomputation captures, and rejects code that it cannot repeat."""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from ctl.configs.error_location import user_frame
from ctl.errors import UsageError
from ctl.replica.graphs import ops
from ctl.replica.graphs.assignments import find_assignments, outermost


def find_captured(operations: Sequence[Any], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors from outside, other than arguments, that a gradient may flow to."""
    inside = {op.name for op in operations}
    known = {id(tensor) for tensor in inputs}
    tensors = {}
    for op in operations:
        for tensor in op.inputs:
            if tensor.op.name not in inside and id(tensor) not in known:
                tensors[id(tensor)] = tensor
    return [
        tensor
        for tensor in tensors.values()
        if is_differentiable(tensor) and record.should_record_backprop([tensor])
    ]


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Returns whether a gradient can flow through a tensor."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _with_called(operations: Sequence[Any]) -> Iterator[Any]:
    """Yields operations, and the operations of the functions that they call."""
    for op in operations:
        yield op
        for _, graph in ops.called_graphs(op):
            yield from _with_called(graph.get_operations())


def _matters(read: Any) -> bool:
    """Returns whether the outputs may depend on a read.

    A fused batch normalization reads the moving statistics only to compute new ones.
    """
    consumers = [op for output in read.outputs for op in output.consumers()]
    return not all(
        op.type.startswith("FusedBatchNorm") and op.get_attr("is_training") for op in consumers
    )


def check_second_pass(name: str, first: Sequence[Any], second: Sequence[Any]) -> None:
    """Raises a UsageError if the second pass cannot be the same as the first.

    Args:
        name: what is recomputed, for the message.
        first: the operations from the beginning of the first pass to the beginning of the second.
        second: the operations of the second pass.
    """
    for assignment in find_assignments(second):
        _reject(
            name,
            assignment.op,
            "assigns a variable, which would happen twice: assign it in self.add_update(lambda: ...) "
            "of a layer, or outside",
        )
    assigned = {id(assignment.handle) for assignment in find_assignments(first)}
    for op in _with_called(second):
        if op.type in ops.RANDOM and op.type not in ops.STATELESS:
            _reject(
                name,
                op,
                f"draws random numbers ({op.type}) that cannot be drawn again: use ctl.random, or draw "
                "them outside",
            )
        if op.type == "ReadVariableOp" and id(outermost(op.inputs[0])) in assigned and _matters(op):
            _reject(
                name,
                op,
                "reads a variable that it has assigned before, so its second value would differ: read "
                "it outside",
            )


def _reject(name: str, op: Any, problem: str) -> None:
    line = user_frame([(frame.filename, frame.lineno) for frame in op.traceback])
    raise UsageError(f"{f'{line}: ' if line else ''}{name} in ctl.recompute {problem}.")
