"""Estimates the memory that a training step needs on one replica, from the traced step.

It omits work space of kernels, fragmentation, and the memory of the process itself. XLA fuses operations
and may need less.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import math
from typing import Any

import tensorflow as tf

from ctl.built.inner_loop import TrainerOwner, loop_of
from ctl.compile import xla
from ctl.data.autograph import convert, traced
from ctl.data.source import Batch
from ctl.errors import UsageError
from ctl.graphs import ops
from ctl.hardware import strategies
from ctl.keras import precision
from ctl.keras.variables import variables_of
from ctl.parts import sharded_optimizer
from ctl.rows import packs, row_mask
from ctl.rows.trace import Trace, UpdateTrace
from ctl.update.part import variables_of_state
from ctl.update.preprocessing import preprocess

# Ops whose output is the memory of their input.
_ALIASES = (
    "Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient",
    "EnsureShape", "CheckNumerics", "XlaOptimizationBarrier",
)  # fmt: skip
# Kernels that write their output into an input of the same size that nobody reads afterwards.
_IN_PLACE = ops.ELEMENTWISE | {"BiasAdd", "LogSoftmax", "Softmax"}
# Ops whose outputs are the memory of a variable, a constant of the program, or an argument.
_NOT_COUNTED = ("Const", "Placeholder", "ReadVariableOp", "VarHandleOp")


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a step on one replica, in bytes.

    Attributes:
        weights: the variables of all models; with central storage their copies, of which most exist
            until the backward pass has read them.
        slots: the variables of all optimizers that one replica holds; with central storage none.
        parts: the variables of the step's parts that it holds, such as averages of weights, by a word.
        gradients: the gradients of a micro-batch.
        gradient_sum: their sum over the earlier micro-batches; 0 for a single micro-batch.
        activations: the tensors that the forward pass of a micro-batch keeps for its backward pass,
            and the temporary tensors of both, at their peak.
        fixed: the part of `activations` that does not depend on the number of micro-batches: the
            preprocessed batch, and the outputs that metrics read.
        step: the peak of activations and gradients together. It can be less than their sum, because
            the gradients grow while the activations are freed.
        input: one batch of the input pipeline.
        prefetched: further batches, in the memory of the host.
        micro_batches: the number of micro-batches.
        reduction: the buffers in which gradients are sent to the other replicas and received.
        incomplete: whether tensors of unknown size are missing, such as those of a loop.
    """

    weights: int
    slots: int
    parts: Mapping[str, int]
    gradients: int
    gradient_sum: int
    activations: int
    fixed: int
    step: int
    input: int
    prefetched: int
    micro_batches: int
    reduction: int = 0
    incomplete: bool = False

    @property
    def persistent(self) -> int:
        """The bytes that are in use between two steps."""
        return self.weights + self.slots + sum(self.parts.values())

    @property
    def peak(self) -> int:
        """The largest number of bytes that are in use on the device at a time."""
        reducing = self.gradients + self.reduction  # nothing else of the step exists by then
        return self.persistent + self.input + max(self.step + self.gradient_sum, reducing)

    def step_bytes(self, micro_batches: int) -> int:
        """Returns the most that a step needs besides `persistent`, with other micro-batches."""
        if micro_batches == self.micro_batches:
            return self.peak - self.persistent
        part = (self.activations - self.fixed) * self.micro_batches / micro_batches
        # The smaller the activations are, the more gradients exist at the peak.
        copies = 2 if micro_batches > 1 else 1
        computing = self.fixed + math.ceil(part) + copies * self.gradients
        return self.input + max(computing, self.gradients + self.reduction)


def estimate(trainer: TrainerOwner) -> MemoryEstimate:
    """Estimates the memory of a trainer's step; traces it and runs nothing.

    Args:
        trainer: a `StandardTrainer`.

    Raises:
        UsageError: the step cannot be traced here, or the trainer's code is wrong.
    """
    inner_loop = loop_of(trainer)
    if inner_loop.plan.own_train_step:
        raise UsageError("the trainer overrides train_step")
    spec = strategies.spec_of(trainer.strategy)
    if spec.coordinated:
        raise UsageError("parameter servers hold the variables, and workers run the step")
    _function, traces, batch = _trace(trainer)  # the function holds the graph
    updates = [update for update in traces[0].updates if update.gradients]
    if not updates:
        raise UsageError("the step does not call minimize")
    count = inner_loop.plan.micro_batches
    shards = inner_loop.plan.options.logical_shards
    steps = [_measure(update, count, trainer.strategy, shards) for update in updates]
    step = max(steps, key=lambda step: step["step"])
    # The gradients of a shard are kept by themselves until all are reduced.
    sums = count - 1 if inner_loop.plan.options.logical_shards else min(count - 1, 1)
    loop = inner_loop.compiled_loop
    batches = loop.size if loop else 1  # a chunk
    prefetch = inner_loop.plan.options.prefetch
    return MemoryEstimate(
        weights=_unique_bytes(
            v for m in inner_loop.step.attributes.models() for v in variables_of(m)
        ),
        slots=0 if spec.central else _unique_bytes(_optimizer_variables(trainer)),
        parts={
            word: _unique_bytes(variables)
            for part in inner_loop.step.parts
            for word, variables in variables_of_state(part).items()
            if not spec.central
        },
        gradient_sum=sums * step["gradients"],
        input=batches * batch,
        # tf.data prepares at least one batch while another one is used.
        prefetched=batches * batch * (prefetch if prefetch >= 0 else 1),
        micro_batches=count,
        **step,
    )


def _trace(trainer: TrainerOwner) -> tuple[Callable[..., tf.Tensor], list[Trace], int]:
    """Traces a step.

    Returns:
        The traced function, what each replica recorded, and the bytes of a replica's batch.
    """
    inner_loop = loop_of(trainer)
    plan = inner_loop.plan
    rows = plan.layout.rows_per_replica
    spec = tf.nest.map_structure(
        lambda x: tf.TensorSpec([rows, *x.shape[1:]], x.dtype), inner_loop.pipeline.element_spec()
    )
    even = plan.layout.even and plan.full_batches
    traces: list[Trace] = []

    def step(batch: Batch, mask: tf.Tensor | None) -> tf.Tensor:
        trace = Trace()
        traces.append(trace)
        with row_mask.examples(
            None if mask is None else tf.cast(mask, plan.dtype),
            first_row=tf.cast(row_mask.row_range(rows)[0], tf.int64),
            step=trainer.global_step.read_value(),
            count=rows,
            seed=plan.options.seed,
            allow_unkeyed=True,
            compiled=plan.compiles_update,
            kernels=plan.options.kernels == "auto",
            micro_batches=plan.micro_batches,
            trace=trace,
        ):
            return convert(trainer.replica_step)(preprocess(trainer, batch))

    def run(batch: Batch, mask: tf.Tensor | None) -> tf.Tensor:
        return trainer.strategy.run(step, args=(batch, mask))

    mask = None if even else tf.TensorSpec([rows], tf.float32)
    # Some layers, such as attention, compute other tensors where XLA compiles them.
    step = xla.jit(step) if plan.compiles_update else step
    with inner_loop.step.trace_scope():
        function = traced(run).get_concrete_function(spec, mask)
    return function, traces, sum(bytes_of(x) or 0 for x in tf.nest.flatten(spec))


def _measure(
    update: UpdateTrace, micro_batches: int, strategy: tf.distribute.Strategy, shards: int
) -> dict[str, Any]:
    """Returns attributes of `MemoryEstimate` of an update, by the first of its micro-batches."""
    flat = tf.nest.flatten(update.gradients[0], expand_composites=True)
    gradients = [x for x in flat if tf.is_symbolic_tensor(x)]
    timeline = Timeline(gradients[0].graph, device=device_of(gradients[0].op))
    places = {op.name: i for i, op in enumerate(timeline.operations)}
    end = max(places.get(x.op.name, 0) for x in gradients) + 1
    rows = [places[x.op.name] for x in update.micro_batches[0].rows if x.op.name in places]
    start = min(rows, default=0) if micro_batches > 1 else max(rows, default=-1) + 1
    excluded = {id(x) for x in gradients}
    # The tensors that metrics read, such as outputs, exist until the end of the step.
    outputs = timeline.alive(range(start, end), end, excluded)
    others = (micro_batches - 1) * outputs
    sizes = [bytes_of(x) or 0 for x in gradients]
    # Each replica sends a buffer with the slots of all shards.
    sent = [shards * size for size in sizes] if strategy.num_replicas_in_sync > 1 else []
    return {
        "gradients": sum(sizes),
        "reduction": sum(sent) + packs.buffer_bytes(strategy, sent if shards else sizes),
        "step": max(timeline.live(set())[:end], default=0) + others,
        "activations": max(timeline.live(excluded)[:end], default=0) + others,
        "fixed": timeline.alive(range(start), start, excluded) + micro_batches * outputs,
        "incomplete": any(i < end for i in timeline.unknown),
    }


def _unique_bytes(variables: Iterable[tf.Variable]) -> int:
    return sum(bytes_of(v) or 0 for v in {id(v): v for v in variables}.values())


def _optimizer_variables(trainer: TrainerOwner) -> Iterator[tf.Variable]:
    for value in trainer.checkpoint_items().values():
        inner = precision.inner(value)
        if hasattr(inner, "apply_gradients"):
            yield from sharded_optimizer.held_variables(inner)


class Timeline:
    """The operations of a graph in the order of the code, and the memory of their tensors.

    A tensor takes memory from the operation that computes it to the last one that reads it. So a tensor
    of a forward pass that the backward pass reads counts until then, and a recomputed block counts its
    inputs, and its activations while its own backward pass runs.

    Args:
        graph: a function graph.
        device: the replica's device, such as "CPU:0"; operations of other replicas do not count.

    Attributes:
        operations: the operations that the graph's results depend on.
        unknown: the positions of operations with a tensor of unknown size, which counts as 0.
    """

    def __init__(self, graph: tf.Graph, *, device: str = ""):
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
                self._last.setdefault(self._owner(x), i)  # nothing may read it
        for op in self.operations:
            for x in op.outputs:
                if id(x) in outputs:
                    self._last[self._owner(x)] = len(self.operations)  # a result is never freed

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
            # Such an operation writes over an input that nothing else reads.
            reused = allocated if op.type in _IN_PLACE and allocated in freed else 0
            graphs = [graph for _, graph in ops.called_graphs(op)]
            # The tensors of a called function exist only while it runs.
            inside = max(
                (max(Timeline(graph).live(set()), default=0) for graph in graphs), default=0
            )
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

    def _owner(self, tensor: tf.Tensor) -> int:
        return self._memory.get(id(tensor), id(tensor))


def _needed(graph: tf.Graph) -> list[tf.Operation]:
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


def _is_alias(op: tf.Operation) -> bool:
    if op.type == "StridedSlice":  # of rows, which are contiguous
        return bool(op.outputs[0].shape[1:] == op.inputs[0].shape[1:])
    return op.type in _ALIASES


def device_of(op: tf.Operation) -> str:
    """Returns the device of an operation, such as "CPU:0"; "" if it has none."""
    return op.device.rpartition("device:")[2].upper()


def bytes_of(tensor: tf.Tensor | tf.Variable) -> int | None:
    """Returns the bytes of a tensor, a variable or a spec; None if they are not known."""
    if tensor.dtype in (tf.resource, tf.string):
        return 0
    if tensor.dtype == tf.variant or not tensor.shape.is_fully_defined():
        return None
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size
