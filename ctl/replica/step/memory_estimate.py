"""Estimates the memory that a training step needs on one replica, from the traced step.

It omits work space of kernels, fragmentation, buffers of the reduction over replicas, and the memory
of the process itself. XLA fuses operations and may need less.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import math
from typing import Any

import tensorflow as tf

from ctl.data.autograph import convert, traced
from ctl.errors import UsageError
from ctl.hardware import coordinator
from ctl.replica.arithmetic import precision, row_mask
from ctl.replica.checks.loss_trace import LossTrace, Update
from ctl.replica.graphs.tensor_lifetimes import Timeline, bytes_of, device_of
from ctl.replica.step.preprocessing import preprocess
from ctl.replica.updates import sharded_optimizer


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a step on one replica, in bytes.

    Attributes:
        weights: the variables of all models.
        slots: the variables of all optimizers; with shard_state, this replica's slices.
        averages: the average of the weights.
        compression: the errors and factors of compressed gradients.
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
        incomplete: whether tensors of unknown size are missing, such as those of a loop.
    """

    weights: int
    slots: int
    averages: int
    compression: int
    gradients: int
    gradient_sum: int
    activations: int
    fixed: int
    step: int
    input: int
    prefetched: int
    micro_batches: int
    incomplete: bool = False

    @property
    def persistent(self) -> int:
        """The bytes that are in use between two steps."""
        return self.weights + self.slots + self.averages + self.compression

    @property
    def peak(self) -> int:
        """The largest number of bytes that are in use on the device at a time."""
        return self.persistent + self.input + self.step + self.gradient_sum

    def step_bytes(self, micro_batches: int) -> int:
        """Returns the most that a step needs besides `persistent`, with other micro-batches."""
        if micro_batches == self.micro_batches:
            return self.peak - self.persistent
        part = (self.activations - self.fixed) * self.micro_batches / micro_batches
        # The smaller the activations are, the more gradients exist at the peak.
        copies = 2 if micro_batches > 1 else 1
        return self.input + self.fixed + math.ceil(part) + copies * self.gradients


@dataclasses.dataclass(frozen=True)
class _Step:
    """The bytes of an update, as in `MemoryEstimate`, where `peak` is called `step`."""

    gradients: int
    peak: int
    activations: int
    fixed: int
    incomplete: bool


def estimate(trainer: Any) -> MemoryEstimate:
    """Estimates the memory of a trainer's step; traces it and runs nothing.

    Args:
        trainer: a `StandardTrainer`.

    Raises:
        UsageError: the step cannot be traced here, or the trainer's code is wrong.
    """
    engine = trainer._ctl_engine
    if engine.plan.own_train_step:
        raise UsageError("the trainer overrides train_step")
    if coordinator.is_coordinated(trainer.strategy):
        raise UsageError("parameter servers hold the variables, and workers run the step")
    _function, traces, batch = _trace(trainer)  # the function holds the graph
    updates = [update for update in traces[0].updates if update.gradients]
    if not updates:
        raise UsageError("the step does not call minimize")
    parts = engine.plan.parts_per_replica
    steps = [_measure(update, parts) for update in updates]
    step = max(steps, key=lambda step: step.peak)
    # The gradients of a shard are kept by themselves until all are reduced.
    sums = parts - 1 if engine.plan.options.logical_shards else min(parts - 1, 1)
    loop, compression = engine.compiled_loop, engine.step.update.compression
    batches = loop.size if loop else 1  # a chunk
    prefetch = engine.plan.options.prefetch
    return MemoryEstimate(
        weights=_unique_bytes(v for m in engine.step.attributes.models() for v in m.variables),
        slots=_unique_bytes(_optimizer_variables(trainer)),
        averages=_unique_bytes(engine.step.ema.state.averages if engine.step.ema else ()),
        compression=_unique_bytes(compression.local_variables() if compression else ()),
        gradients=step.gradients,
        gradient_sum=sums * step.gradients,
        activations=step.activations,
        fixed=step.fixed,
        step=step.peak,
        input=batches * batch,
        # tf.data prepares at least one batch while another one is used.
        prefetched=batches * batch * (prefetch if prefetch >= 0 else 1),
        micro_batches=parts,
        incomplete=step.incomplete,
    )


def _trace(trainer: Any) -> tuple[Any, list[LossTrace], int]:
    """Traces a step.

    Returns:
        The traced function, what each replica recorded, and the bytes of a replica's batch.
    """
    engine, plan = trainer._ctl_engine, trainer._ctl_engine.plan
    rows = plan.layout.rows_per_replica
    spec = tf.nest.map_structure(
        lambda x: tf.TensorSpec([rows, *x.shape[1:]], x.dtype), engine.pipeline.element_spec()
    )
    even = plan.layout.even and plan.full_batches
    traces: list[LossTrace] = []

    def step(batch: Any, mask: tf.Tensor | None) -> tf.Tensor:
        trace = LossTrace([])
        traces.append(trace)
        with row_mask.examples(
            None if mask is None else tf.cast(mask, plan.dtype),
            first_row=tf.cast(row_mask.row_range(rows)[0], tf.int64),
            step=trainer.global_step.read_value(),
            count=rows,
            seed=plan.options.seed,
            allow_unkeyed=True,
            compiled=plan.xla in ("loop", "step"),
            parts=plan.parts_per_replica,
            trace=trace,
        ):
            return convert(trainer.replica_step)(preprocess(trainer, batch))

    def run(batch: Any, mask: tf.Tensor | None) -> Any:
        return trainer.strategy.run(step, args=(batch, mask))

    mask = None if even else tf.TensorSpec([rows], tf.float32)
    with engine.trace_scope():
        function = traced(run).get_concrete_function(spec, mask)
    return function, traces, sum(bytes_of(x) or 0 for x in tf.nest.flatten(spec))


def _measure(update: Update, parts: int) -> _Step:
    """Measures the first micro-batch of an update, of which there are `parts`."""
    flat = tf.nest.flatten(update.gradients[0], expand_composites=True)
    gradients = [x for x in flat if tf.is_symbolic_tensor(x)]
    timeline = Timeline(gradients[0].graph, device=device_of(gradients[0].op))
    places = {op.name: i for i, op in enumerate(timeline.operations)}
    end = max(places.get(x.op.name, 0) for x in gradients) + 1
    rows = [places[x.op.name] for x in update.micro_batches[0].rows if x.op.name in places]
    start = min(rows, default=0) if parts > 1 else max(rows, default=-1) + 1
    excluded = {id(x) for x in gradients}
    # The tensors that metrics read, such as outputs, exist until the end of the step.
    outputs = timeline.alive(range(start, end), end, excluded)
    others = (parts - 1) * outputs
    return _Step(
        gradients=sum(bytes_of(x) or 0 for x in gradients),
        peak=max(timeline.live(set())[:end], default=0) + others,
        activations=max(timeline.live(excluded)[:end], default=0) + others,
        fixed=timeline.alive(range(start), start, excluded) + parts * outputs,
        incomplete=any(i < end for i in timeline.unknown),
    )


def _unique_bytes(variables: Iterable[Any]) -> int:
    return sum(bytes_of(v) or 0 for v in {id(v): v for v in variables}.values())


def _optimizer_variables(trainer: Any) -> Iterator[Any]:
    for value in trainer.checkpoint_items().values():
        inner = value.inner_optimizer if precision.has_loss_scale(value) else value
        if hasattr(inner, "apply_gradients"):
            yield from sharded_optimizer.held_variables(inner)
