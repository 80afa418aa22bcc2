"""Records the losses of a step while it is traced, for the searches at the end of the trace.

`compare_replicas` and `compare_micro_batches` check that the parts of a step compute the same function
of their rows. Each of them traces the user's code again: a counter or another state of Python then gives
each its own constants, or its own ops.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.replica.graphs import ops
from ctl.replica.graphs.dataflow import outer_tensor

# The barrier that orders micro-batches has several inputs; its output i is its input i.
_IDENTITIES = ("Identity", "StopGradient", "EnsureShape", "Snapshot", "XlaOptimizationBarrier")
_SHOWN = 40  # characters of a constant


class GlobalValue(NamedTuple):
    """A value that is the same function of the global batch on every split, such as a sum over replicas.

    Attributes:
        output: the value.
        local: this replica's contribution to it.
        copies: how often the value repeats `local` on `axis` if all replicas contribute the same.
        axis: see `copies`.
    """

    output: tf.Tensor
    local: tf.Tensor
    copies: int = 1
    axis: int = 0


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


@dataclasses.dataclass
class Update:
    """One update of the step.

    Attributes:
        inputs: the batch and the weights, outside of a compiled function.
        aliases: the id of a tensor inside of that function -> the tensor that it stands for.
        micro_batches: the micro-batches, in order.
        gradients: the gradients of each micro-batch.
    """

    inputs: list[tf.Tensor]
    aliases: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    micro_batches: list[MicroBatchTrace] = dataclasses.field(default_factory=list)
    gradients: list[Sequence[Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class LossTrace:
    """One replica's trace of a step.

    Attributes:
        batch: the tensors of the replica's batch, before `preprocess`, and the row mask.
        updates: one for each call of `minimize`.
        global_values: values of the global batch, such as sums over the replicas.
        constants: the id of a tensor of the first replica -> its value in the first step.
        names: the id of a tensor of the batch -> its name in it.
        losses_only: whether the step ends its updates once the losses are recorded.
    """

    batch: list[tf.Tensor]
    updates: list[Update] = dataclasses.field(default_factory=list)
    global_values: list[GlobalValue] = dataclasses.field(default_factory=list)
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    losses_only: bool = False

    @classmethod
    def of(cls, inputs: Any, **fields: Any) -> "LossTrace":
        """Returns the trace of a batch, or of a batch and its mask."""
        batch = inputs[0] if isinstance(inputs, tuple) else inputs
        names = {id(x): name for name, x in batch.items()} if isinstance(batch, Mapping) else {}
        return cls(symbolic(inputs), names=names, **fields)

    def begin_update(self, inputs: Any) -> None:
        """Records the tensors that the micro-batches of an update are cut from."""
        self._structure = inputs
        self.updates.append(Update(symbolic([inputs.batch, inputs.weights])))

    def enter_function(self, inputs: Any) -> None:
        """Records the same structure inside the function that computes the micro-batches."""
        update = self.updates[-1]
        update.aliases.clear()  # of an earlier attempt, which failed
        update.micro_batches.clear()
        update.gradients.clear()
        pairs = zip(tf.nest.flatten(inputs), tf.nest.flatten(self._structure), strict=True)
        update.aliases.update(
            {id(inner): outer for inner, outer in pairs if inner is not outer and outer is not None}
        )
        self._inside = inputs  # ids are unique only while the tensors exist

    def add_micro_batch(
        self, rows: Any, first_row: Any, size: Any, losses: Sequence[tf.Tensor]
    ) -> None:
        """Records a micro-batch after its forward pass."""
        self.updates[-1].micro_batches.append(
            MicroBatchTrace(symbolic(rows), first_row, size, losses)
        )

    def add_gradients(self, gradients: Sequence[Any]) -> None:
        """Records the gradients of a micro-batch after its backward pass."""
        self.updates[-1].gradients.append(gradients)

    def sources(self, update: Update) -> list[tf.Tensor]:
        """Returns the tensors that an update's losses depend on, in the same order on all replicas."""
        parts = [(part.rows, part.first_row, part.size) for part in update.micro_batches]
        return symbolic([self.batch, parts, [value.output for value in self.global_values]])

    @contextlib.contextmanager
    def record_collectives(self) -> Iterator[None]:
        """Records the sums over replicas that the code inside computes, including the user's."""
        context: Any = tf.distribute.get_replica_context()
        reduce, gather = context.all_reduce, context.all_gather
        replicas = context.num_replicas_in_sync

        def all_reduce(reduce_op: Any, value: Any, options: Any = None) -> Any:
            result = reduce(reduce_op, value, options)
            self.add_global(result, value)
            return result

        def all_gather(value: Any, axis: int, options: Any = None) -> Any:
            result = gather(value, axis, options)
            self.add_global(result, value, copies=replicas, axis=axis)
            return result

        # Only on this context, which belongs to this replica and, on several replicas, to this trace.
        context.all_reduce, context.all_gather = all_reduce, all_gather
        try:
            yield
        finally:
            del context.all_reduce, context.all_gather

    def add_global(self, results: Any, values: Any, **repetition: int) -> None:
        """Records sums over the replicas, and this replica's contributions to them."""
        for output, local in zip(tf.nest.flatten(results), tf.nest.flatten(values), strict=True):
            if tf.is_symbolic_tensor(output) and tf.is_symbolic_tensor(local):
                self.global_values.append(GlobalValue(output, local, **repetition))


def symbolic(values: Any) -> list[tf.Tensor]:
    """Returns the tensors of graphs in a nested structure."""
    flat: Sequence[Any] = tf.nest.flatten(values)
    return [value for value in flat if tf.is_symbolic_tensor(value)]


class Difference(NamedTuple):
    """The place where two traces differ.

    Attributes:
        op: the op of the second trace.
        values: its description in the first and in the second trace.
    """

    op: Any
    values: tuple[str, str]


def compare_replicas(first: LossTrace, second: LossTrace, distance: int) -> Difference | None:
    """Returns the first difference of the losses of two replicas; None without one.

    Args:
        first: the trace of the first replica of the process.
        second: the trace of another one.
        distance: the difference of the replicas' numbers.
    """
    for one, two in zip(first.updates, second.updates, strict=False):
        comparison = _Comparison(replica=distance)
        comparison.leaves(first.sources(one), second.sources(two))
        for part, other in zip(one.micro_batches, two.micro_batches, strict=True):
            comparison.rows = _size(part) or 1
            difference = comparison.run(part.losses, other.losses)
            difference = difference or comparison.run(one.inputs, two.inputs)
            if difference is not None:
                return difference
    return None


def compare_micro_batches(trace: LossTrace) -> Difference | None:
    """Returns the first difference of the losses of a replica's micro-batches; None without one.

    Code may use other ops for another number of rows, so only equal static numbers are compared.
    """
    for update in trace.updates:
        firsts: dict[Any, MicroBatchTrace] = {}
        for other in update.micro_batches:
            first = firsts.setdefault(_size(other), other)
            comparison = _Comparison(replica=0)
            shared = symbolic([trace.batch, update.inputs, [v.output for v in trace.global_values]])
            comparison.leaves([*shared, *_leaves(first)], [*shared, *_leaves(other)])
            difference = comparison.run(first.losses, other.losses)
            if difference is not None:
                return difference
    return None


def has_equal_parts(update: Update) -> bool:
    """Returns whether two micro-batches have the same number of rows, if there are several."""
    sizes = [_size(part) for part in update.micro_batches]
    return len(sizes) < 2 or len({*sizes}) < len(sizes)


def _size(part: MicroBatchTrace) -> int | None:
    return part.size if isinstance(part.size, int) else None


def _leaves(part: MicroBatchTrace) -> list[tf.Tensor]:
    return symbolic([part.rows, part.first_row, part.size])


class _Comparison:
    """Walks through the ops of two traces side by side.

    Attributes:
        rows: the number of rows of each trace, if it is static.
    """

    def __init__(self, *, replica: int):
        self.rows = 1
        self._replica = replica
        self._seen: set[tuple[int, int]] = set()
        self._leaves: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._keep: list[Any] = []

    def leaves(self, one: Sequence[tf.Tensor], two: Sequence[tf.Tensor]) -> None:
        """Sets the tensors that the walk does not go beyond, in the same order for both traces."""
        for own, tensors in zip(self._leaves, (one, two), strict=True):
            own.update({id(tensor): i for i, tensor in enumerate(tensors)})
        self._keep.extend([one, two])

    def run(self, one: Sequence[Any], two: Sequence[Any]) -> Difference | None:
        """Returns the first difference of the ops that two lists of tensors are computed from."""
        stack = list(zip(one, two, strict=True))
        while stack:
            pair = stack.pop()
            key = (id(pair[0]), id(pair[1]))
            if pair[0] is pair[1] or key in self._seen:
                continue
            self._seen.add(key)
            self._keep.append(pair)
            if id(pair[0]) in self._leaves[0] and id(pair[1]) in self._leaves[1]:
                continue
            a, b = pair
            if not (hasattr(a, "op") and hasattr(b, "op")):  # eager: variables, tables
                continue
            if a.op.type in _IDENTITIES or b.op.type in _IDENTITIES:
                stack.append(tuple(_skip_identity(x) for x in pair))
                continue
            if a.op.type != b.op.type:
                return Difference(b.op, (a.op.type, b.op.type))
            if a.op.type == "Const":
                values = self._unequal(a.op, b.op)
                if values:
                    return Difference(b.op, values)
            stack.extend(self._inputs(a, b))
        return None

    def _inputs(self, a: tf.Tensor, b: tf.Tensor) -> list[tuple[Any, Any]]:
        if a.op.type == "Placeholder":
            outer = (outer_tensor(a), outer_tensor(b))
            return [] if None in outer else [outer]
        pairs = list(zip(a.op.inputs, b.op.inputs, strict=False))
        if a.op.type in ops.FUNCTIONS:
            graphs = (ops.called_graphs(op) for op in (a.op, b.op))
            for (_, one), (_, two) in zip(*graphs, strict=False):
                if one is not two:
                    pairs.extend(zip(one.outputs, two.outputs, strict=False))
        return pairs

    def _unequal(self, a: Any, b: Any) -> tuple[str, str] | None:
        """Returns the values of two constants, if they differ other than by the replica."""
        one, two = a.get_attr("value"), b.get_attr("value")
        if one == two or "replica_id_in_sync_group" in b.name:
            return None
        x, y = tf.make_ndarray(one), tf.make_ndarray(two)
        if x.shape == y.shape and x.dtype.kind in "iu":
            shift = y.astype(int) - x.astype(int)
            # The number of the replica, and the position of its first row.
            allowed = {self._replica * self.rows} | ({self._replica} if not x.any() else set())
            if len(set(shift.flatten().tolist())) == 1 and shift.flatten()[0] in allowed:
                return None
        return _show(x, y)


def _skip_identity(tensor: tf.Tensor) -> tf.Tensor:
    return tensor.op.inputs[tensor.value_index] if tensor.op.type in _IDENTITIES else tensor


def _show(one: Any, two: Any) -> tuple[str, str]:
    first, second = (" ".join(str(value).split())[:_SHOWN] for value in (one, two))
    return first, second
