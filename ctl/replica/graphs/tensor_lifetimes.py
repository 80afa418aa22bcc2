"""Computes the memory of the tensors of a graph, if its operations run in the order of the code.

A tensor takes memory from the operation that computes it to the last one that reads it. So a tensor of
a forward pass that the backward pass reads counts until then, and a recomputed block counts its inputs,
and its activations while its own backward pass runs.
"""

import math
from typing import Any

import tensorflow as tf

from ctl.replica.graphs import ops

# Ops whose output is the memory of their input.
_ALIASES = (
    "Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient",
    "EnsureShape", "CheckNumerics", "XlaOptimizationBarrier",
)  # fmt: skip
# Kernels that write their output into an input of the same size that nobody reads afterwards.
_IN_PLACE = (
    "Add", "AddN", "AddV2", "BiasAdd", "Elu", "EluGrad", "Erf", "Exp", "Log", "LogSoftmax",
    "Maximum", "Minimum", "Mul", "Neg", "RealDiv", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "Rsqrt",
    "Select", "SelectV2", "Sigmoid", "SigmoidGrad", "Softmax", "Softplus", "Sqrt", "Square", "Sub",
    "Tanh", "TanhGrad",
)  # fmt: skip
# Ops whose outputs are the memory of a variable, a constant of the program, or an argument.
_NOT_COUNTED = ("Const", "Placeholder", "ReadVariableOp", "VarHandleOp")


class Timeline:
    """The operations of a graph in the order of the code, and the memory of their tensors.

    Args:
        graph: a function graph.
        device: the replica's device, such as "CPU:0"; operations of other replicas do not count.

    Attributes:
        operations: the operations that the graph's results depend on.
        unknown: the positions of operations with a tensor of unknown size, which counts as 0.
    """

    def __init__(self, graph: Any, *, device: str = ""):
        self.unknown: list[int] = []
        self.operations = [op for op in _needed(graph) if device_of(op) in ("", device)]
        self._memory: dict[int, int] = {}  # tensor -> the tensor whose memory it is
        self._sizes: dict[int, int] = {}
        self._last: dict[int, int] = {}
        outputs = {id(x) for x in getattr(graph, "outputs", ())}
        for i, op in enumerate(self.operations):
            for x in op.inputs:
                self._last[self._owner(x)] = i
            for number, x in enumerate(op.outputs):
                if number < len(op.inputs) and _is_alias(op):
                    self._memory[id(x)] = self._owner(op.inputs[number])
                size = 0 if op.type in _NOT_COUNTED else bytes_of(x)
                # Such outputs of FusedBatchNorm are work space, which most devices do not need.
                if size is None and not op.type.startswith("FusedBatchNorm"):
                    self.unknown.append(i)
                self._sizes[id(x)] = size or 0
                self._last.setdefault(self._owner(x), i)
        for op in self.operations:
            for x in op.outputs:
                if id(x) in outputs:
                    self._last[self._owner(x)] = len(self.operations)

    def live(self, excluded: set[int]) -> list[int]:
        """Returns the bytes that exist while each operation runs, without some tensors."""
        owners = {self._memory.get(key, key) for key in excluded}
        result: list[int] = []
        live = 0
        for i, op in enumerate(self.operations):
            new = {self._owner(x) for x in op.outputs if self._owner(x) == id(x)} - owners
            read = {self._owner(x) for x in op.inputs} - owners
            # Tensors that were not computed here are not part of `live`.
            freed = [self._sizes[k] for k in read if k in self._sizes and self._last[k] == i]
            allocated = sum(self._sizes[key] for key in new)
            reused = allocated if op.type in _IN_PLACE and allocated in freed else 0
            inside = max(map(_peak_inside, _called(op)), default=0)
            result.append(live + max(allocated, inside) - reused)
            live += allocated - sum(freed)
            live -= sum(self._sizes[key] for key in new if self._last[key] == i)
        return result

    def alive(self, created: range, at: int, excluded: set[int]) -> int:
        """Returns the bytes of tensors that some operations compute and that are read from `at` on."""
        owners = {self._memory.get(key, key) for key in excluded}
        return sum(
            self._sizes[id(x)]
            for op in self.operations[created.start : created.stop]
            for x in op.outputs
            if self._owner(x) == id(x) and id(x) not in owners and self._last[id(x)] >= at
        )

    def _owner(self, tensor: Any) -> int:
        return self._memory.get(id(tensor), id(tensor))


def _needed(graph: Any) -> list[Any]:
    """Returns the operations that the results and the side effects of a graph depend on, in order."""
    pending = [x.op for x in getattr(graph, "outputs", ())]
    pending += getattr(graph, "control_outputs", ())
    names: set[str] = set()
    while pending:
        op = pending.pop()
        if op.name not in names:
            names.add(op.name)
            pending += [*(x.op for x in op.inputs), *op.control_inputs]
    return [op for op in graph.get_operations() if op.name in names]


def _is_alias(op: Any) -> bool:
    if op.type == "StridedSlice":  # of rows, which are contiguous
        return bool(op.outputs[0].shape[1:] == op.inputs[0].shape[1:])
    return op.type in _ALIASES


def _called(op: Any) -> list[Any]:
    return [graph for _, graph in ops.called_graphs(op)]


def _peak_inside(graph: Any) -> int:
    return max(Timeline(graph).live(set()), default=0)


def device_of(op: Any) -> str:
    """Returns the device of an operation, such as "CPU:0"; "" if it has none."""
    return op.device.rpartition("device:")[2].upper()


def bytes_of(tensor: Any) -> int | None:
    """Returns the bytes of a tensor, a variable or a spec; None if they are not known."""
    if tensor.dtype in (tf.resource, tf.string):
        return 0
    if tensor.dtype == tf.variant or not tensor.shape.is_fully_defined():
        return None
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size
