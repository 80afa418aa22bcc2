"""The probe: computes values of a traced step for the first batch, with other rows exchanged."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import types
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.replica.arithmetic.trace import Trace, symbolic
from ctl.replica.graphs import ops

ReadBatch = Callable[[], Any]

# Relative to the largest value. The shapes are the same, so the same kernels compute a row.
_TOLERANCES = {8: 1e-6, 4: 1e-4, 2: 2e-2}
# Ops that read the data of the run, wait for other replicas, or change a state.
_NOT_COPIED = (
    "Iterator", "MultiDeviceIterator", "Collective", "Nccl", "Assign", "ResourceScatter",
    "ResourceApply", "Queue", "Barrier", "Stage", "Unstage", "Send", "Recv", "_Arg",
    "CrossReplicaSum", "XlaAllReduce", "XlaReplicaId",
)  # fmt: skip
_FAILURES = (tf.errors.OpError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)


class ProbeError(Exception):
    """The values cannot be computed.

    Attributes:
        op: the op that may combine rows, if it is known.
    """

    op: Any = None


class Probe:
    """Computes values from the batch of one replica.

    Values of the global batch (sums over the replicas) and statistics of batch normalizations stay as
    they are for the first batch, so that only dependence within the replica is seen.

    Args:
        values: [rows, ...] tensors of the step.
        trace: the batch, and the sums over the replicas.
        first: the id of a tensor of the trace -> its value in the first step.
        aliases: the id of a tensor -> the tensor that it stands for.
        statistics: the ops of batch normalizations that combine rows.
        positions: positions of rows in the global batch; None if the places of rows do not matter.

    Attributes:
        by_place: the positions of the values that depend on the place of a row in its replica.
    """

    def __init__(
        self,
        values: Sequence[tf.Tensor],
        trace: Trace,
        first: Mapping[int, Any] = types.MappingProxyType({}),
        aliases: Mapping[int, tf.Tensor] = types.MappingProxyType({}),
        statistics: Sequence[Any] = (),
        positions: Sequence[tf.Tensor] | None = None,
    ):
        self.trace = trace
        self.by_place: set[int] = set()
        self._moves = positions is not None
        self._positions = {id(x): x for x in positions or ()}
        self._values, self._first, self._aliases = values, first, aliases
        self._global = {id(value.output): value for value in trace.global_values}
        self._statistics = {id(output): op for op in statistics for output in op.outputs}
        self._fixed: list[tf.Tensor] = []

    def depends_on_other_rows(
        self, batch: Sequence[Any], rows: int, *, dropped: "Probe | None" = None
    ) -> set[int]:
        """Returns the positions of the values that change for a row if other rows of the batch change.

        Args:
            batch: the values of the batch, of the first `rows` rows, which exist.
            rows: the number of rows of the values, at least 2.
            dropped: instead of changing other rows, drop the last one, and compute the values of this
                probe.

        Raises:
            ProbeError: the values cannot be computed, or differ from one computation to the next.
        """
        changing: set[int] = set()
        try:
            observe = tf.function(self._observe, autograph=False)
            compute = tf.function(self._compute, autograph=False)
            first = tf.zeros([], tf.int64)
            fixed = observe(batch, first)
            reference = compute(batch, fixed, first)
            everything = np.arange(rows)
            if _differ(reference, compute(batch, fixed, first), everything):
                raise ProbeError("its numbers are not the same each time")
            if dropped:
                compute = tf.function(dropped._compute, autograph=False)
                fewer = compute([values[: rows - 1] for values in batch], fixed, first)
                return _differ([x[: rows - 1] for x in reference], fewer, everything[:-1])
            for kept in _kept_rows(rows, reference):
                changed = compute(_replace_others(batch, kept), fixed, first)
                changing |= _differ(reference, changed, kept)
                if len(changing) == len(reference):
                    break
            if self._moves:
                # The replica begins one row later: the loss of each row is now in the place before.
                moved = compute(
                    [_move(values) for values in batch], self._move_fixed(fixed), first + 1
                )
                before, after = [x[1:rows] for x in reference], [x[: rows - 1] for x in moved]
                self.by_place = _differ(before, after, everything[:-1])
        except _FAILURES as error:
            raise ProbeError(type(error).__name__) from error
        return changing

    def _observe(self, batch: Sequence[tf.Tensor], first: tf.Tensor) -> list[tf.Tensor]:
        """Computes the values that stay constant for the other batches."""
        copy = _Copy(self, self._known(batch, first))
        for value in self._values:
            copy.tensor(value)
        self._fixed = copy.reached
        return [copy.tensor(tensor) for tensor in self._fixed]

    def _compute(
        self, batch: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor], first: tf.Tensor
    ) -> list[tf.Tensor]:
        known = self._known(batch, first) | dict(zip(map(id, self._fixed), fixed, strict=True))
        copy = _Copy(self, known, fixed=True)
        return [copy.tensor(value) for value in self._values]

    def _move_fixed(self, fixed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        pairs = zip(self._fixed, fixed, strict=True)
        return [_move(value) if id(x) in self._positions else value for x, value in pairs]

    def _known(self, batch: Sequence[tf.Tensor], first: tf.Tensor) -> dict[int, Any]:
        numbers = {key: tf.convert_to_tensor(value) for key, value in self._first.items()}
        numbers |= {
            id(x): tf.cast(first, x.dtype) for x in self._positions.values() if not x.shape.rank
        }
        return numbers | dict(zip(map(id, symbolic(self.trace.inputs)), batch, strict=True))


class _Copy:
    """Copies ops into the graph that is being traced.

    Attributes:
        reached: the values of the global batch, and the statistics, that the copied ops read.
    """

    def __init__(self, probe: Probe, known: dict[int, Any], *, fixed: bool = False):
        self._probe, self._copies, self._is_fixed = probe, known, fixed
        self.reached: list[tf.Tensor] = []

    def tensor(self, tensor: tf.Tensor) -> Any:
        """Returns the copy of a tensor."""
        stack = [tensor]
        while stack:
            top = stack[-1]
            if id(top) in self._copies:
                stack.pop()
                continue
            sources = self._sources(top)
            missing = [x for x in sources if id(x) not in self._copies]
            if missing:
                stack.extend(missing)
                continue
            self._copy(top, [self._copies[id(x)] for x in sources])
            stack.pop()
        return self._copies[id(tensor)]

    def _sources(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors that a tensor is copied from."""
        if not hasattr(tensor, "op"):  # eager, such as the handle of a variable
            self._copies[id(tensor)] = tensor
            return []
        probe = self._probe
        if id(tensor) in probe._global:
            return [probe._global[id(tensor)].local]
        if id(tensor) in probe._aliases:
            return [probe._aliases[id(tensor)]]
        if tensor.op.type == "Placeholder":
            captures = getattr(tensor.graph, "captures", ())
            outer = next((o for o, i in captures if i is tensor and tf.is_tensor(o)), None)
            if outer is None:
                raise ProbeError("its inputs are not known")
            return [outer]
        return list(tensor.op.inputs)

    def _copy(self, tensor: tf.Tensor, inputs: list[Any]) -> None:
        if id(tensor) in self._copies:
            return
        probe = self._probe
        value = probe._global.get(id(tensor))
        if value is not None:
            self.reached.append(tensor)
            self._copies[id(tensor)] = (
                tf.concat([inputs[0]] * value.copies, value.axis) if value.copies > 1 else inputs[0]
            )
            return
        op = tensor.op
        if id(tensor) in probe._aliases or op.type == "Placeholder":
            self._copies[id(tensor)] = inputs[0]
            return
        for each in ops.with_called([op]):
            if each.type.startswith(_NOT_COPIED) or each.type.endswith("Send"):
                raise ProbeError(f"it reads or changes a state ({each.type})")
        attributes = {k: v for k, v in op.node_def.attr.items() if k != "_class"}
        is_statistics = id(tensor) in probe._statistics
        if is_statistics and self._is_fixed:  # the fused op of a batch normalization
            attributes["is_training"].b = False
            inputs[3:5] = [self._copies[id(output)] for output in op.outputs[1:3]]
        elif is_statistics:
            fused = op.type.startswith("FusedBatchNorm")
            self.reached.extend(op.outputs[1:3] if fused else op.outputs)
        graph = tf.compat.v1.get_default_graph()
        copied = graph.create_op(
            op.type,
            inputs,
            [x.dtype for x in op.outputs],
            name=op.name.split("/")[-1],
            attrs=attributes,
        )
        for old, new in zip(op.outputs, copied.outputs, strict=True):
            self._copies.setdefault(id(old), new)
        if id(tensor) in probe._positions:
            self.reached.append(tensor)


def _kept_rows(count: int, values: Sequence[Any]) -> Iterator[np.ndarray]:
    """Yields sets of rows to keep while the others change.

    Among them are the rows with the smallest and the largest values: a loss that selects the hardest
    examples of a batch is zero for the others.
    """
    rows = np.arange(count)
    sets = [rows[: count // 2], rows[count // 2 :], rows[::2], rows[1::2]]
    for value in values:
        if value.dtype.is_floating or value.dtype.is_integer:
            sums = tf.cast(value, tf.float64).numpy()[:count].reshape(count, -1).sum(axis=1)
            sets += [rows[[np.argmin(sums)]], rows[[np.argmax(sums)]]]
    seen = set()
    for kept in sets:
        if tuple(kept) not in seen:
            seen.add(tuple(kept))
            yield kept


def _replace_others(batch: Sequence[Any], kept: np.ndarray) -> list[Any]:
    """Replaces the rows of a batch that are not kept by those that are."""
    result = []
    for values in batch:
        source = np.arange(values.shape[0])
        others = np.setdiff1d(source, kept)
        source[others] = kept[np.arange(len(others)) % len(kept)]
        result.append(tf.gather(values, source))
    return result


def _move(values: tf.Tensor) -> tf.Tensor:
    """Moves each row to the place before; the first one becomes the last."""
    return tf.gather(values, np.roll(np.arange(values.shape[0]), -1))


def _differ(one: Sequence[Any], two: Sequence[Any], rows: np.ndarray) -> set[int]:
    """Returns the positions of the values in which entries of some rows differ beyond rounding."""
    pairs = enumerate(zip(one, two, strict=True))
    return {i for i, (a, b) in pairs if _differs(a.numpy(), b.numpy(), rows)}


def _differs(one: np.ndarray, two: np.ndarray, rows: np.ndarray) -> bool:
    if one.shape != two.shape:
        return True
    one, two = one[rows], two[rows]
    if one.dtype.kind not in "fV":  # V: bfloat16
        return not np.array_equal(one, two)
    tolerance = _TOLERANCES[one.dtype.itemsize]
    one, two = one.astype(np.float64), two.astype(np.float64)
    scale = np.max(np.abs(one), initial=0.0, where=np.isfinite(one))
    return not np.allclose(one, two, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def find_dependent(
    probe: Probe, read_batch: ReadBatch, count: int | None, micro_batches: int = 1,
    *, dropped: Probe | None = None,
) -> set[int]:  # fmt: skip
    """Returns which values of a probe depend on other rows, as computed for the first batch.

    Args:
        probe: values of the first of some micro-batches of the batch.
        read_batch: returns a batch like the tensors of the trace, possibly with more rows, and its mask.
        count: the number of rows of the values; None if the trace accepts any number.
        micro_batches: their number.
        dropped: see `Probe.depends_on_other_rows`.
    """
    with tf.init_scope():
        tensors = symbolic(probe.trace.inputs)
        size = tensors[0].shape[0] if count else None
        values = tf.nest.flatten(read_existing(read_batch, size or 2 * micro_batches))
        # The row mask, or weights that the step has added.
        values += [tf.ones(values[0].shape[:1])] * (len(values) + 1 == len(tensors))
        if len(values) != len(tensors):
            raise ProbeError("the batches of the data are others")
        values = [tf.cast(v[:size], x.dtype) for v, x in zip(values, tensors, strict=True)]
        rows = count or values[0].shape[0] // micro_batches
        if rows < 2:
            raise ProbeError("a micro-batch has one row")
        return probe.depends_on_other_rows(values, rows, dropped=dropped)


def read_existing(read_batch: ReadBatch, least: int) -> Any:
    """Returns the rows of the first batch that exist; they repeat if it has less than `least`."""
    try:
        batch, mask = read_batch()
    # ValueError: distributed data of the user cannot be read while a replica is traced.
    except (tf.errors.OpError, StopIteration, ValueError) as error:
        raise ProbeError("there is no batch to compute it for") from error
    if mask is not None:
        batch = tf.nest.map_structure(lambda x: tf.boolean_mask(x, mask > 0), batch)
    rows = tf.nest.flatten(batch)[0].shape[0]
    if rows < 2:
        raise ProbeError("the batch has one row")
    return tf.nest.map_structure(lambda x: tf.gather(x, np.arange(max(rows, least)) % rows), batch)
