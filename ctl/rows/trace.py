"""The record of one replica's trace of a step: what layers, losses and updates report to it."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras

from ctl.data.source import Nest
from ctl.graphs.dataflow import Fold


class GlobalValue(NamedTuple):
    """A value that is the same function of the global batch on every split, such as a sum over replicas.

    Attributes:
        output: the value.
        local: this replica's contribution to it.
        copies: how often the value repeats `local` on `axis` if all replicas contribute the same.
        axis: see `copies`.
        gathered: whether it contains the rows of all replicas.
        mean: whether it is the mean of the contributions, not their sum.
    """

    output: tf.Tensor
    local: tf.Tensor
    copies: int = 1
    axis: int = 0
    gathered: bool = False
    mean: bool = False


class MicroBatchTrace(NamedTuple):
    """The tensors of one micro-batch.

    Attributes:
        rows: the tensors that have one entry per row: features, mask and weights.
        first_row: the position of the first row in the global batch.
        size: the number of rows.
        losses: the results of the loss function.
    """

    rows: list[tf.Tensor]
    first_row: tf.Tensor
    size: int | tf.Tensor
    losses: Sequence[tf.Tensor]


class MetricUpdate(NamedTuple):
    """A call of a metric's `update_state` in the user's `update_metrics`.

    Attributes:
        metric: the metric.
        values: the arguments, without the sample weights.
        sample_weight: the sample weights; None if there are none.
        outputs: the outputs that `update_metrics` got.
        row_mask: the weights that it got.
    """

    metric: tf_keras.metrics.Metric
    values: list[Nest]
    sample_weight: tf.Tensor | None
    outputs: Nest
    row_mask: tf.Tensor | None


@dataclasses.dataclass
class UpdateTrace:
    """One update of the step.

    Attributes:
        inputs: the batch and the weights, outside of a compiled function.
        aliases: the id of a tensor inside of that function -> the tensor that it stands for.
        micro_batches: the micro-batches, in order.
        penalties: the regularization losses of each micro-batch that depend on its rows.
        gradients: the gradients of each micro-batch.
        metrics: the ops of each micro-batch's metrics.
        operations: how many ops the graph had after the reduction of the micro-batches.
        conditions: scalar bools, whether to apply it.
        chosen: whether the user has chosen the variables to train.
        undivided: whether a loss is a sum that nothing divides.
    """

    inputs: list[tf.Tensor]
    aliases: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    micro_batches: list[MicroBatchTrace] = dataclasses.field(default_factory=list)
    penalties: list[Sequence[tf.Tensor]] = dataclasses.field(default_factory=list)
    gradients: list[Sequence[tf.Tensor]] = dataclasses.field(default_factory=list)
    metrics: list[Sequence[tf.Operation]] = dataclasses.field(default_factory=list)
    operations: int = 0
    conditions: list[tf.Tensor] = dataclasses.field(default_factory=list)
    chosen: bool = False
    undivided: bool = False


@dataclasses.dataclass(frozen=True)
class Stream:
    """A sequence of draws in a step; the draws are counted while the step is traced.

    Attributes:
        identity: the source of its key, besides the number of the draw.
        name: the name of the code that draws, as the subject of a message.
    """

    identity: str
    name: str


@dataclasses.dataclass(frozen=True)
class Folded:
    """A draw with several entries for each row.

    Attributes:
        bits: the tensor of bits, [entries, ...].
        count: the number of rows.
        fold: how they hold the rows.
        problem: the message if the ops do not show that fold.
    """

    bits: tf.Tensor
    count: int
    fold: Fold
    problem: str


@dataclasses.dataclass
class Trace:
    """What the code of one replica's step reports while it is traced.

    Attributes:
        inputs: the batch of the replica before `preprocess`, or the batch and its row mask.
        updates: one for each call of `minimize`.
        global_values: values of the global batch, such as sums over the replicas.
        positions: positions of rows in the global batch: of the first row, or of each row.
        row_wise: tensors whose rows are computed one by one, each with the tensors of the rows.
        applied: one scalar bool for each update that this step may skip: whether it was applied.
        wanted: one entry for each update: the condition to apply it, or None.
        refused: the functions that could not read other rows because of `Rows.isolated`.
        views: the numbers of views that the code has concatenated.
        folded: the draws for tensors with several entries per row on axis 0.
        shared: the draws of one tensor for all rows that has as many entries as a replica has rows.
        results: what the step returns; None if that is not known.
        weights: the weights of the losses.
        metric_updates: the updates of metrics.
        metric_rows: the outputs and the weights of the `update_metrics` that is being traced.
        split_uses: a line of the user's code in an update -> what it uses of the split.
        replicas: the number of replicas that the user's code sees; None for that of the strategy.
        losses_only: whether the step ends its updates once the losses are recorded.
        call: what the checks note of this call of the step, shared by the replicas of the process.
    """

    inputs: Nest = None
    updates: list[UpdateTrace] = dataclasses.field(default_factory=list)
    global_values: list[GlobalValue] = dataclasses.field(default_factory=list)
    positions: list[tf.Tensor] = dataclasses.field(default_factory=list)
    row_wise: list[tuple[tf.Tensor, list[tf.Tensor]]] = dataclasses.field(default_factory=list)
    applied: list[tf.Tensor] = dataclasses.field(default_factory=list)
    wanted: list[tf.Tensor | None] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    shared: list[tf.Tensor] = dataclasses.field(default_factory=list)
    views: set[int] = dataclasses.field(default_factory=set)
    folded: list[Folded] = dataclasses.field(default_factory=list)
    results: Nest = None
    weights: list[tf.Tensor] = dataclasses.field(default_factory=list)
    metric_updates: list[MetricUpdate] = dataclasses.field(default_factory=list)
    metric_rows: tuple[Nest, tf.Tensor | None] | None = None
    split_uses: dict[str, str] = dataclasses.field(default_factory=dict)
    replicas: int | None = None
    losses_only: bool = False
    call: dict[str, Any] = dataclasses.field(default_factory=dict)

    def begin_update(
        self, inputs: Nest, numbers: Mapping[str, Any] | None = None, *, chosen: bool = False
    ) -> None:
        """Records the tensors that the micro-batches of an update are cut from.

        Args:
            inputs: the batch and the weights.
            numbers: what is summed to the denominators of the losses.
            chosen: as the attribute of `UpdateTrace`.
        """
        self._structure = inputs
        tensors = {id(x): x for x in symbolic([inputs.batch, inputs.weights, numbers])}
        undivided = any(isinstance(each, float) for each in (numbers or {}).values())
        self.updates.append(UpdateTrace([*tensors.values()], chosen=chosen, undivided=undivided))

    def enter_function(self, inputs: Nest) -> None:
        """Records the same structure inside the function that computes the micro-batches."""
        if not self.updates:
            self.begin_update(inputs)
        update = self._update
        update.aliases.clear()  # of an earlier attempt, which failed
        update.micro_batches.clear()
        update.penalties.clear()
        update.gradients.clear()
        pairs = zip(tf.nest.flatten(inputs), tf.nest.flatten(self._structure), strict=True)
        update.aliases.update(
            {id(inner): outer for inner, outer in pairs if inner is not outer and outer is not None}
        )
        self._inside = inputs  # ids are unique only while the tensors exist

    def add_micro_batch(
        self, rows: Nest, first_row: tf.Tensor, size: int | tf.Tensor, losses: Sequence[tf.Tensor]
    ) -> None:
        """Records a micro-batch after its forward pass."""
        part = MicroBatchTrace(symbolic(rows), first_row, size, losses)
        self._update.micro_batches.append(part)

    def add_penalties(self, penalties: Sequence[tf.Tensor]) -> None:
        """Records the regularization losses of a micro-batch that depend on its rows."""
        self._update.penalties.append(penalties)

    def add_gradients(self, gradients: Sequence[tf.Tensor]) -> None:
        """Records the gradients of a micro-batch after its backward pass."""
        self._update.gradients.append(gradients)

    def end_micro_batches(self, graph: Any) -> None:
        """Records that the micro-batches are reduced, in the graph of the step; None if it is eager."""
        self._update.operations = len(graph.get_operations()) if graph else 0

    def add_metrics(self, operations: Sequence[tf.Operation]) -> None:
        """Records the ops by which the metrics of a micro-batch are updated."""
        self._update.metrics.append(operations)

    @property
    def _update(self) -> UpdateTrace:
        """The current update; micro-batches may be computed outside of one."""
        if not self.updates:
            self.updates.append(UpdateTrace([]))
        return self.updates[-1]

    def add_global(self, results: Nest, values: Nest, **repetition: Any) -> None:
        """Records sums over the replicas, and this replica's contributions to them."""
        for output, local in zip(tf.nest.flatten(results), tf.nest.flatten(values), strict=True):
            if tf.is_symbolic_tensor(output) and tf.is_symbolic_tensor(local):
                self.global_values.append(GlobalValue(output, local, **repetition))

    @contextlib.contextmanager
    def record_collectives(self) -> Iterator[None]:
        """Records the sums over replicas that the code inside computes, including the user's."""
        context: tf.distribute.ReplicaContext = tf.distribute.get_replica_context()
        reduce, gather = context.all_reduce, context.all_gather
        replicas = context.num_replicas_in_sync

        def all_reduce(reduce_op: tf.distribute.ReduceOp, value: Nest, options: Any = None) -> Nest:
            result = reduce(reduce_op, value, options)
            is_mean = str(getattr(reduce_op, "name", reduce_op)).upper() == "MEAN"
            self.add_global(result, value, mean=is_mean)
            return result

        def all_gather(value: Nest, axis: int, options: Any = None) -> Nest:
            result = gather(value, axis, options)
            self.add_global(result, value, copies=replicas, axis=axis, gathered=True)
            return result

        # Only on this context, which belongs to this replica and, on several replicas, to this trace.
        context.all_reduce, context.all_gather = all_reduce, all_gather
        try:
            yield
        finally:
            del context.all_reduce, context.all_gather


def symbolic(values: Nest) -> list[tf.Tensor]:
    """Returns the tensors of graphs in a nested structure."""
    flat: Sequence[tf.Tensor] = tf.nest.flatten(values)
    return [value for value in flat if tf.is_symbolic_tensor(value)]
