"""Copies the ops of a traced step into another graph, to compute them for other batches."""

from collections.abc import Callable, Mapping, Sequence
import types
from typing import Any

import tensorflow as tf

from ctl.checks.probe_error import FAILURES, ProbeError
from ctl.checks.row_samples import IntegerUses
from ctl.graphs import ops
from ctl.graphs.unoptimized import without_graph_optimization
from ctl.hardware.quiet import hold_back_stderr
from ctl.private.tensorflow import resource_variable_ops
from ctl.rows.trace import Trace, symbolic

# Ops that read the data of the run, wait for other replicas, or change a state.
_NOT_COPIED = (
    "Iterator", "MultiDeviceIterator", "Collective", "Nccl", "Assign", "ResourceScatter",
    "ResourceApply", "Queue", "Barrier", "Stage", "Unstage", "Send", "Recv", "_Arg",
    "CrossReplicaSum", "XlaAllReduce", "XlaReplicaId",
)  # fmt: skip
LATE = 10**6  # of counters, such as global_step


def has_mask(trace: Trace) -> bool:
    """Returns whether the last input of a trace is the mask of the rows that exist."""
    return isinstance(trace.inputs, tuple) and trace.inputs[1] is not None


class Computation:
    """Computes a function of tensors in a graph of its own, which is traced once for their shapes.

    Args:
        function: the function.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function, self._traces = function, dict[Any, Any]()

    def __call__(self, *arguments: Any) -> Any:
        """Returns what the function returns."""
        arguments = tf.nest.map_structure(tf.convert_to_tensor, arguments)
        key = tuple(str(x.shape) for x in tf.nest.flatten(arguments))
        # A concrete function, since TensorFlow warns of a tf.function that is made often.
        if key not in self._traces:
            traced = tf.function(self._function, autograph=False)
            self._traces[key] = traced.get_concrete_function(*arguments)
        # TensorFlow logs each error, such as of rows that are made up.
        with without_graph_optimization(), hold_back_stderr(*FAILURES):
            return self._traces[key](*arguments)


class CopiedTrace:
    """A trace whose ops are copied.

    Args:
        trace: the batch, and the values of the global batch.
        first: the id of a tensor of the trace -> its value in the first step.
        aliases: the id of a tensor -> the tensor that it stands for.
        statistics: the ops of batch normalizations that combine rows.
        positions: positions of rows in the global batch, which a copy may replace.
        shifted: tensors that are copied with other values.

    Attributes:
        uses: how the copied ops use the integers of the batch.
    """

    def __init__(
        self,
        trace: Trace,
        first: Mapping[int, Any] = types.MappingProxyType({}),
        aliases: Mapping[int, tf.Tensor] = types.MappingProxyType({}),
        statistics: Sequence[Any] = (),
        positions: Sequence[tf.Tensor] = (),
        shifted: Sequence[tf.Tensor] = (),
    ):
        self.trace, self.aliases = trace, aliases
        self.global_values = {id(value.output): value for value in trace.global_values}
        self.statistics = {id(output) for op in statistics for output in op.outputs}
        self.positions = {id(x): x for x in positions}
        self.shifted = {id(x) for x in shifted}
        self.uses = IntegerUses(symbolic(trace.inputs))
        self._first = first
        # Handle of a scalar number -> the handle, and a variable that the copied ops read instead.
        self._counters: dict[int, tuple[Any, Any]] = {}

    @property
    def has_counters(self) -> bool:
        """Whether the copied ops read scalar variables, such as counters."""
        return bool(self._counters)

    def known(self, batch: Sequence[tf.Tensor], first: Any = 0) -> dict[int, Any]:
        """Returns the id of a tensor of the trace -> its copy, for a batch and its first position."""
        numbers = {key: tf.convert_to_tensor(value) for key, value in self._first.items()}
        numbers |= {
            id(x): tf.cast(first, x.dtype) for x in self.positions.values() if not x.shape.rank
        }
        return numbers | dict(zip(map(id, symbolic(self.trace.inputs)), batch, strict=True))

    def set_counters(self, number: int | None) -> None:
        """Sets what the copied ops read of scalar variables; None for the numbers that these have.

        A factor that grows during a run, which is a float, usually ends at 1.
        """
        for handle, variable in self._counters.values():
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
            if number is not None:
                is_factor = variable.dtype.is_floating and number >= LATE
                value = tf.cast(1 if is_factor else number, variable.dtype)
            variable.assign(value)

    def handle_of(self, handle: Any) -> Any:
        """Returns the handle of a variable; for a scalar number, of one that `set_counters` sets."""
        data = getattr(handle, "_handle_data", None)
        if data is None or not data.is_set or not data.shape_and_type:
            return handle
        kind = data.shape_and_type[0]
        dtype, shape = tf.as_dtype(kind.dtype), tf.TensorShape(kind.shape)
        if not (dtype.is_integer or dtype.is_floating) or shape.rank != 0:
            return handle
        if id(handle) not in self._counters:
            with tf.init_scope(), tf.device(handle.device):
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
                variable = resource_variable_ops.ResourceVariable(value, trainable=False)
            self._counters[id(handle)] = handle, variable
        return self._counters[id(handle)][1].handle


class GraphCopier:
    """Copies ops into the graph that is being traced.

    Args:
        source: the trace.
        known: the id of a tensor -> its copy.
        fixed: whether values of the global batch are among them.

    Attributes:
        reached: the values of the global batch, the statistics and the positions that the copied ops
            read.
    """

    def __init__(self, source: CopiedTrace, known: dict[int, Any], *, fixed: bool = False):
        self._source, self._copies, self._is_fixed = source, known, fixed
        self.reached: list[tf.Tensor] = []

    def tensor(self, tensor: tf.Tensor) -> Any:
        """Returns the copy of a tensor."""
        stack = [tensor]
        while stack:
            top = stack[-1]
            if id(top) in self._copies:
                stack.pop()
                continue
            inputs = self._inputs(top)
            missing = [x for x in inputs if id(x) not in self._copies]
            if missing:
                stack.extend(missing)
                continue
            if id(top) not in self._copies:
                self._copy(top, inputs)
            stack.pop()
        return self._copies[id(tensor)]

    def set(self, tensor: tf.Tensor, copy: tf.Tensor) -> None:
        """Sets what stands for a tensor."""
        self._copies[id(tensor)] = copy

    def _inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors that a tensor is copied from."""
        source = self._source
        if not hasattr(tensor, "op"):  # eager, such as the handle of a variable
            self._copies[id(tensor)] = source.handle_of(tensor)
            return []
        if id(tensor) in source.global_values:
            return [source.global_values[id(tensor)].local]
        if id(tensor) in source.aliases:
            return [source.aliases[id(tensor)]]
        if tensor.op.type == "Placeholder":
            captures = getattr(tensor.graph, "captures", ())
            outer = next((o for o, i in captures if i is tensor and tf.is_tensor(o)), None)
            if outer is None:
                raise ProbeError("its inputs are not known")
            return [outer]
        return list(tensor.op.inputs)

    def _copy(self, tensor: tf.Tensor, inputs: Sequence[tf.Tensor]) -> None:
        source, copies = self._source, [self._copies[id(x)] for x in inputs]
        value = source.global_values.get(id(tensor))
        is_alias = id(tensor) in source.aliases or tensor.op.type == "Placeholder"
        source.uses.add(tensor, inputs, is_alias=is_alias, is_global=value is not None)
        if value is not None:
            self.reached.append(tensor)
            parts = [copies[0]] * value.copies
            self._copies[id(tensor)] = tf.concat(parts, value.axis) if parts[1:] else parts[0]
        elif is_alias:
            self._copies[id(tensor)] = copies[0]
        else:
            self._copy_op(tensor, copies)

    def _copy_op(self, tensor: tf.Tensor, inputs: list[Any]) -> None:
        op, source = tensor.op, self._source
        for each in ops.with_called([op]):
            if each.type.startswith(_NOT_COPIED) or each.type.endswith("Send"):
                raise ProbeError(f"it reads or changes a state ({each.type})")
        attributes = {k: v for k, v in op.node_def.attr.items() if k != "_class"}
        if id(tensor) in source.statistics:
            is_fused = op.type.startswith("FusedBatchNorm")
            if self._is_fixed:  # all others are known
                attributes["is_training"].b = False
                inputs[3:5] = [self._copies[id(output)] for output in op.outputs[1:3]]
            else:
                self.reached.extend(op.outputs[1:3] if is_fused else op.outputs)
        copied = tf.compat.v1.get_default_graph().create_op(
            op.type,
            inputs,
            [x.dtype for x in op.outputs],
            name=op.name.split("/")[-1].lstrip("_"),  # of tf.clip_by_global_norm
            attrs=attributes,
        )
        for old, new in zip(op.outputs, copied.outputs, strict=True):
            self._copies.setdefault(id(old), _shift(new) if id(old) in source.shifted else new)
        if id(tensor) in source.positions:
            self.reached.append(tensor)


def _shift(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_bool:
        return tf.logical_not(value)
    # By more than 1, which is a usual bound of a number of rows.
    return value + 2 if value.dtype.is_integer else value * 1.01 + 1.5
