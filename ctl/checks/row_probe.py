"""The probe: computes values of a traced step for some batches, with other rows exchanged."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import types
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.checks import row_samples
from ctl.graphs import ops
from ctl.graphs.unoptimized import without_graph_optimization
from ctl.hardware.quiet import hold_back_stderr
from ctl.private.tensorflow import resource_variable_ops
from ctl.rows.trace import GlobalValue, Trace, symbolic

ReadBatch = Callable[[], Any]

# Relative to the largest value. The shapes are the same, so the same kernels compute a row.
_TOLERANCES = {8: 1e-6, 4: 1e-4, 2: 2e-2}
# Ops that read the data of the run, wait for other replicas, or change a state.
_NOT_COPIED = (
    "Iterator", "MultiDeviceIterator", "Collective", "Nccl", "Assign", "ResourceScatter",
    "ResourceApply", "Queue", "Barrier", "Stage", "Unstage", "Send", "Recv", "_Arg",
    "CrossReplicaSum", "XlaAllReduce", "XlaReplicaId",
)  # fmt: skip
_COMPARISONS = ("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual")
# Ops that return the entries of a row, and those for which any integer of a row is possible.
_VIEWS = ("Cast", "ExpandDims", "Identity", "Placeholder", "Reshape", "Squeeze", "StridedSlice")
_ANY_INTEGER = (
    *_COMPARISONS, *ops.SHAPES, "OneHot", "ResourceGather", "SparseSoftmaxCrossEntropyWithLogits",
)  # fmt: skip
LATE = 10**6  # of counters, such as global_step
_LATE = (LATE, LATE + 1, 3, 100)
FAILURES = (tf.errors.OpError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)


class ProbeError(Exception):
    """The values cannot be computed.

    Attributes:
        op: the op that may combine rows, if it is known.
        counts: the number of entries on axis 0 of a value, and the number of rows, if they differ.
    """

    op: Any = None
    counts: tuple[int, int] | None = None


class Probe:
    """Computes values from the batch of one replica; traced once.

    Values of the global batch (sums over the replicas) and statistics of batch normalizations stay as
    they are for the first batch, so that only dependence within the replica is seen.

    Args:
        values: [rows, ...] tensors of the step.
        trace: the batch, and the sums over the replicas.
        first: the id of a tensor of the trace -> its value in the first step.
        aliases: the id of a tensor -> the tensor that it stands for.
        statistics: the ops of batch normalizations that combine rows.
        positions: positions of rows in the global batch; None if the places of rows do not matter.
        shifted: tensors that are copied with other values.
        own_places: whether the values contain positions that the user computed, from the number of the
            replica. What a collective returned then moves with the rows.

    Attributes:
        by_place: the positions of the values that depend on the place of a row in its replica.
        constant: the positions of the values that are the same for all batches, which shows nothing.
    """

    def __init__(
        self,
        values: Sequence[tf.Tensor],
        trace: Trace,
        first: Mapping[int, Any] = types.MappingProxyType({}),
        aliases: Mapping[int, tf.Tensor] = types.MappingProxyType({}),
        statistics: Sequence[Any] = (),
        positions: Sequence[tf.Tensor] | None = None,
        own_places: bool = False,
        shifted: Sequence[tf.Tensor] = (),
    ):
        self.trace = trace
        self.by_place: set[int] = set()
        self.constant: set[int] = set()
        self._moves = positions is not None
        self._own_places = own_places
        self._shifted = {id(x) for x in shifted}
        self._positions = {id(x): x for x in positions or ()}
        self.values, self._first, self._aliases = values, first, aliases
        self.global_values = {id(value.output): value for value in trace.global_values}
        self._statistics = {id(output): op for op in statistics for output in op.outputs}
        self._fixed: list[tf.Tensor] = []
        self._functions: dict[Any, Any] = {}
        self._constants: set[float] = set()
        self._flags: list[bool] = []  # in all batches until now
        # The id of a tensor with the entries of an input -> its position.
        self._views = {id(x): i for i, x in enumerate(symbolic(trace.inputs)) if x.dtype.is_integer}
        # The position of an input -> what it is compared with; the inputs with other uses.
        self._compared: dict[int, set[float]] = {}
        self._used: set[int] = set()
        # Handle of an integer scalar -> the handle, and a variable that the copied ops read instead.
        self._counters: dict[int, tuple[Any, Any]] = {}

    def depends_on_other_rows(
        self,
        batches: Sequence[Sequence[Any]],
        rows: int,
        *,
        labels: Sequence[bool] = (),
        dropped: "Probe | None" = None,
    ) -> set[int]:
        """Returns the positions of the values that change for a row if other rows of the batch change.

        Args:
            batches: the values of some batches, of the first `rows` rows, which exist.
            rows: the number of rows of the values, at least 2.
            labels: which values of a batch are labels.
            dropped: instead of changing other rows, drop the last one, and compute the values of this
                probe.

        Raises:
            ProbeError: the values cannot be computed, or differ from one computation to the next.
        """
        batch, *others = batches
        changing: set[int] = set()
        self.by_place, self.constant = set(), {*range(len(self.values))}
        everything = np.arange(rows)
        try:
            fixed = self.observe(batch)
            reference = self.compute(batch, fixed)
            if differ(reference, self.compute(batch, fixed), everything):
                raise ProbeError("its numbers are not the same each time")
            for value in reference:
                if value.shape.rank and value.shape[0] != rows:
                    error = ProbeError("its values are not one per row")
                    error.counts = int(value.shape[0]), rows
                    raise error
            if dropped:
                if dropped is not self:
                    dropped.observe([values[: rows - 1] for values in batch])
                fewer = dropped.compute([values[: rows - 1] for values in batch], fixed)
                return differ([x[: rows - 1] for x in reference], fewer, everything[:-1])
            for kept in _kept_rows(rows, reference):
                changed = self.compute(_replace_others(batch, kept), fixed)
                changing |= differ(reference, changed, kept)
                if len(changing) == len(reference):
                    break
            self._move(batch, fixed, reference, finite=False)
        except FAILURES as error:
            raise ProbeError(type(error).__name__) from error
        earlier, start = batch, reference
        for sample, number in self._samples(batch, others, labels):
            if len(changing | self.by_place) == len(reference):
                break
            try:  # the code may reject rows that are made up
                reference = self.compute(sample, fixed, number)
                self.constant -= differ(start, reference, everything)
                for kept in (everything[::2], everything[1::2]):
                    mixed = [combine(*pair, kept) for pair in zip(sample, earlier, strict=True)]
                    changed = self.compute(mixed, fixed, number)
                    changing |= differ(reference, changed, kept, finite=True)
                if not number:
                    self._move(sample, fixed, reference, finite=True)
            except FAILURES:
                continue
            finally:
                earlier = sample
        return changing

    def compute(self, batch: Sequence[Any], fixed: Any = None, number: int | None = None) -> Any:
        """Computes the values.

        Args:
            batch: the values of a batch.
            fixed: the values of the global batch, from another batch; None for those of this one.
            number: the value of counters, such as `global_step`; None for the one that they have.
        """
        fixed = self.observe(batch) if fixed is None else fixed
        self.set_counters(number)
        return self._call(self._compute, batch, fixed)

    def observe(self, batch: Sequence[Any]) -> Any:
        """Computes the values that stay constant for the other batches."""
        self.set_counters(None)
        return self._call(self._observe, batch)

    def is_changed_by(self, shifted: "Probe", batch: Sequence[Any], labels: Sequence[bool]) -> bool:
        """Returns whether a probe of the same values, with shifted tensors, computes other ones."""
        rows = np.arange(batch[0].shape[0])
        for sample in [batch, *(sample for sample, _ in self._samples(batch, (), labels))]:
            with contextlib.suppress(*FAILURES):
                if differ(self.compute(sample), shifted.compute(sample), rows):
                    return True
        return False

    def is_sum_of_rows(self, batch: Sequence[Any], labels: Sequence[bool]) -> bool:
        """Returns whether each value is a sum of a term of each row, such as a gradient.

        If two batches exchange rows, the sum of their two values then stays the same.
        """
        fixed = self.observe(batch)
        earlier: Sequence[Any] = [np.roll(x, 1, axis=0) for x in batch]
        for sample, number in [(batch, None), *self._samples(batch, (), labels)]:
            pairs = [*zip(sample, earlier, strict=True)]
            mixed = [[combine(*pair, slice(i, None, 2)) for pair in pairs] for i in (0, 1)]
            with contextlib.suppress(*FAILURES):  # the code may reject rows that are made up
                self.set_counters(number)
                one, two, three, four = (
                    self._call(self._totals, x, fixed) for x in (sample, earlier, *mixed)
                )
                if differ([one + two], [three + four], ..., finite=True):
                    return False
            earlier = sample
        return True

    def set_counters(self, number: int | None) -> None:
        """Sets what the values read of integer variables; None for the numbers that these have."""
        for handle, variable in self._counters.values():
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
            variable.assign(value if number is None else tf.cast(number, variable.dtype))

    def _samples(
        self, batch: Sequence[Any], others: Sequence[Sequence[Any]], labels: Sequence[bool]
    ) -> Iterator[tuple[Sequence[Any], int | None]]:
        """Yields further batches, and numbers of late steps for some of them."""
        yield from ((other, None) for other in others)
        made: list[list[np.ndarray]] = []
        if labels:
            values = [[x.numpy() for x in each] for each in (batch, *others)]
            flags = [all(map(row_samples.is_flag, column)) for column in zip(*values, strict=True)]
            self._flags = [a and b for a, b in zip(flags, self._flags or flags, strict=True)]
            compared = {i: v for i, v in self._compared.items() if labels[i] or i not in self._used}
            made = [*row_samples.vary(values[0], labels, self._constants, self._flags, compared)]
        yield from ((each, None) for each in made)
        late = [*_LATE, *(int(v) for v in self._constants)] if self._counters else []
        yield from ((made[i % len(made)], number) for i, number in enumerate(late) if made)

    def _move(
        self, batch: Sequence[Any], fixed: Any, reference: Sequence[Any], *, finite: bool
    ) -> None:
        """Lets the replica begin one row later: the loss of each row is then in the place before."""
        if not self._moves:
            return

        def compare(reference: Sequence[Any], fixed: Sequence[Any]) -> set[int]:
            pairs = zip(self._fixed, fixed, strict=True)
            moves = [self._move_fixed(tensor, value) for tensor, value in pairs]
            moved = self._call(self._compute, [_move(x) for x in batch], moves, first=1)
            before, after = [x[1:] for x in reference], [x[:-1] for x in moved]
            return differ(before, after, np.arange(before[0].shape[0]), finite=finite)

        found = compare(reference, fixed)
        if found and self._own_places:
            with contextlib.suppress(*FAILURES):
                fixed = self.make_distinct(fixed)
                found &= compare(self.compute(batch, fixed), fixed)
        self.by_place |= found

    def make_distinct(self, fixed: Sequence[Any], replica: int = 0) -> list[Any]:
        """Returns values for the global batch in which no two rows that a collective returned are equal.

        Rows that are equal have an order, as in tf.argsort, by their places among the rows of all.

        Args:
            fixed: the values.
            replica: the replica whose rows get the smallest values.
        """
        return [self._distinct(x, v, replica) for x, v in zip(self._fixed, fixed, strict=True)]

    def _distinct(self, tensor: tf.Tensor, value: tf.Tensor, replica: int) -> tf.Tensor:
        collected = self._collected(tensor)
        if collected is None or not (value.dtype.is_floating or value.dtype.is_integer):
            return value
        count = value.shape[0]
        numbers = np.split(np.arange(count), collected.copies)
        numbers.insert(replica, numbers.pop(0))
        added = np.concatenate(numbers).reshape([count, *[1] * (value.shape.rank - 1)])
        return value * count + tf.cast(added, value.dtype)

    def _collected(self, tensor: tf.Tensor) -> GlobalValue | None:
        """Returns the collective of TensorFlow that returned a tensor with the rows of all replicas."""
        value = self.global_values.get(id(tensor))
        return value if value and value.gathered and not value.axis else None

    def _move_fixed(self, tensor: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        if id(tensor) in self._positions:
            return _move(value)
        collected = self._collected(tensor)
        if not self._own_places or collected is None:
            return value
        return tf.concat([_move(part) for part in tf.split(value, collected.copies)], 0)

    def _call(self, method: Callable[..., Any], *arguments: Any, first: int = 0) -> Any:
        """Calls a method as a traced function."""
        arguments = tf.nest.map_structure(tf.convert_to_tensor, (*arguments, np.int64(first)))
        shapes = [x.shape for x in tf.nest.flatten(arguments)]
        key = (method.__name__, *map(str, shapes))
        # A concrete function, since TensorFlow warns of a tf.function that is made often.
        if key not in self._functions:
            traced = tf.function(method, autograph=False)
            self._functions[key] = traced.get_concrete_function(*arguments)
        # TensorFlow logs each error, such as of rows that are made up.
        with without_graph_optimization(), hold_back_stderr(*FAILURES):
            return self._functions[key](*arguments)

    def _observe(self, batch: Sequence[tf.Tensor], first: tf.Tensor) -> list[tf.Tensor]:
        copy = GraphCopier(self, self.known(batch, first))
        for value in self.values:
            copy.tensor(value)
        self._fixed = copy.reached
        return [copy.tensor(tensor) for tensor in self._fixed]

    def _compute(
        self, batch: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor], first: tf.Tensor
    ) -> list[tf.Tensor]:
        known = self.known(batch, first) | dict(zip(map(id, self._fixed), fixed, strict=True))
        copy = GraphCopier(self, known, fixed=True)
        return [copy.tensor(value) for value in self.values]

    def _totals(
        self, batch: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor], first: tf.Tensor
    ) -> tf.Tensor:
        """Returns the values in one tensor, each summed over its first axis to save memory.

        Their largest entry is the scale: a gradient that is zero has nothing but rounding.
        """
        values = self._compute(batch, fixed, first)
        is_half = any(
            x.dtype.size == 2
            for op in tf.compat.v1.get_default_graph().get_operations()
            for x in op.outputs
        )
        dtype = tf.bfloat16 if is_half else tf.float32  # for the tolerance
        totals = [tf.reduce_sum(x, axis=0) if x.shape.rank else x for x in values]
        return tf.concat([tf.reshape(tf.cast(x, dtype), [-1]) for x in totals], axis=0)

    def handle_of(self, handle: Any) -> Any:
        """Returns the handle of a variable; for an integer scalar, of one that a sample may set."""
        data = getattr(handle, "_handle_data", None)
        if data is None or not data.is_set or not data.shape_and_type:
            return handle
        kind = data.shape_and_type[0]
        dtype, shape = tf.as_dtype(kind.dtype), tf.TensorShape(kind.shape)
        if not dtype.is_integer or shape.rank != 0:
            return handle
        if id(handle) not in self._counters:
            with tf.init_scope(), tf.device(handle.device):
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
                variable = resource_variable_ops.ResourceVariable(value, trainable=False)
            self._counters[id(handle)] = handle, variable
        return self._counters[id(handle)][1].handle

    def known(self, batch: Sequence[tf.Tensor], first: tf.Tensor) -> dict[int, Any]:
        """Returns the id of a tensor of the trace -> its copy, for the tensors of a batch."""
        numbers = {key: tf.convert_to_tensor(value) for key, value in self._first.items()}
        numbers |= {
            id(x): tf.cast(first, x.dtype) for x in self._positions.values() if not x.shape.rank
        }
        return numbers | dict(zip(map(id, symbolic(self.trace.inputs)), batch, strict=True))


class GraphCopier:
    """Copies ops into the graph that is being traced.

    Args:
        probe: the probe.
        known: the id of a tensor -> its copy.
        fixed: whether values of the global batch are among them.

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
            self._copy(top, sources)
            stack.pop()
        return self._copies[id(tensor)]

    def _sources(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors that a tensor is copied from."""
        probe = self._probe
        if not hasattr(tensor, "op"):  # eager, such as the handle of a variable
            self._copies[id(tensor)] = probe.handle_of(tensor)
            return []
        if id(tensor) in probe.global_values:
            return [probe.global_values[id(tensor)].local]
        if id(tensor) in probe._aliases:
            return [probe._aliases[id(tensor)]]
        if tensor.op.type == "Placeholder":
            captures = getattr(tensor.graph, "captures", ())
            outer = next((o for o, i in captures if i is tensor and tf.is_tensor(o)), None)
            if outer is None:
                raise ProbeError("its inputs are not known")
            return [outer]
        return list(tensor.op.inputs)

    def _copy(self, tensor: tf.Tensor, sources: Sequence[tf.Tensor]) -> None:
        if id(tensor) in self._copies:
            return
        probe, inputs = self._probe, [self._copies[id(x)] for x in sources]
        value = probe.global_values.get(id(tensor))
        views = {id(x): probe._views[id(x)] for x in sources if id(x) in probe._views}
        is_view = id(tensor) in probe._aliases or tensor.op.type in _VIEWS
        if is_view and value is None and [*views] == [*map(id, sources[:1])]:
            probe._views[id(tensor)] = views[id(sources[0])]
        elif tensor.op.type not in _ANY_INTEGER:
            probe._used.update(views.values())
        if value is not None:
            self.reached.append(tensor)
            self._copies[id(tensor)] = (
                tf.concat([inputs[0]] * value.copies, value.axis) if value.copies > 1 else inputs[0]
            )
            return
        op = tensor.op
        if op.type in _COMPARISONS:
            constants = [tf.get_static_value(x) for x in op.inputs]
            found = {float(c) for c in constants if np.ndim(c) == 0 and _is_number(c)}
            probe._constants |= found
            for view in views.values():
                probe._compared.setdefault(view, set()).update(found)
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
            self._copies.setdefault(id(old), _shift(new) if id(old) in probe._shifted else new)
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
    source = np.arange(batch[0].shape[0])
    others = np.setdiff1d(source, kept)
    source[others] = kept[np.arange(len(others)) % len(kept)]
    return [tf.gather(values, source) for values in batch]


def _shift(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_bool:
        return tf.logical_not(value)
    # By more than 1, which is a usual bound of a number of rows.
    return value + 2 if value.dtype.is_integer else value * 1.01 + 1.5


def _is_number(value: Any) -> bool:
    return value is not None and np.asarray(value).dtype.kind in "iuf" and np.isfinite(value)


def combine(values: Any, others: Any, kept: Any) -> Any:
    """Returns values with the rows of others, except for the kept ones."""
    result = np.array(others)
    result[kept] = np.asarray(values)[kept]
    return result


def _move(values: tf.Tensor) -> tf.Tensor:
    """Moves each row to the place before; the first one becomes the last."""
    return tf.gather(values, np.roll(np.arange(values.shape[0]), -1))


def differ(one: Sequence[Any], two: Sequence[Any], rows: Any, *, finite: bool = False) -> set[int]:
    """Returns the positions of the values in which entries of some rows differ beyond rounding.

    Args:
        one: values, [rows, ...] each.
        two: the same values, computed otherwise.
        rows: the rows.
        finite: ignore entries that are not finite in both, and values of other shapes.
    """
    pairs = enumerate(zip(one, two, strict=True))
    return {i for i, (a, b) in pairs if _differs(a.numpy(), b.numpy(), rows, finite=finite)}


def _differs(one: np.ndarray, two: np.ndarray, rows: Any, *, finite: bool) -> bool:
    if one.shape != two.shape:
        return not finite
    one, two = one[rows], two[rows]
    if one.dtype.kind not in "fV":  # V: bfloat16
        return not np.array_equal(one, two)
    tolerance = _TOLERANCES[one.dtype.itemsize]
    one, two = one.astype(np.float64), two.astype(np.float64)
    if finite:
        both = np.isfinite(one) & np.isfinite(two)
        one, two = one[both], two[both]
    scale = np.max(np.abs(one), initial=0.0, where=np.isfinite(one))
    return not np.allclose(one, two, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def find_dependent(
    probe: Probe, batches: Sequence[ReadBatch], count: int | None, micro_batches: int = 1,
    *, dropped: Probe | None = None,
) -> set[int]:  # fmt: skip
    """Returns which values of a probe depend on other rows, as computed for some batches.

    Args:
        probe: values of the first of some micro-batches of the batch.
        batches: return a batch like the tensors of the trace, possibly with more rows, and its mask.
            All but the first may fail.
        count: the number of rows of the values; None if the trace accepts any number.
        micro_batches: their number.
        dropped: see `Probe.depends_on_other_rows`.
    """
    with tf.init_scope():
        size = symbolic(probe.trace.inputs)[0].shape[0] if count else None
        first, labels = read_values(probe.trace, batches[0], size, least=2 * micro_batches)
        rows = count or first[0].shape[0] // micro_batches
        if rows < 2:
            raise ProbeError("a micro-batch has one row")
        others = []
        for read in batches[1:]:
            with contextlib.suppress(ProbeError):
                values, _ = read_values(
                    probe.trace, read, size or len(first[0]), least=2, is_first=False
                )
                others += [values] if values[0].shape == first[0].shape else []
        return probe.depends_on_other_rows([first, *others], rows, labels=labels, dropped=dropped)


def read_values(
    trace: Trace, read: ReadBatch, size: int | None, *, least: int, is_first: bool = True
) -> tuple[list[tf.Tensor], list[bool]]:
    """Returns the values of a batch for the tensors of a trace, and which of them are labels.

    Args:
        trace: the trace.
        read: returns the batch and its mask.
        size: the number of rows; None for those that the batch has, or `least`.
        least: see `size`.
        is_first: whether to make rows up if there is no batch.
    """
    tensors = symbolic(trace.inputs)
    batch = read_existing(read, size or least, trace if is_first else None)
    values = tf.nest.flatten(batch)
    keys = sorted(batch) if isinstance(batch, Mapping) else []
    labels = [key == "label" for key in keys for _ in tf.nest.flatten(batch[key])]
    # The row mask, or weights that the step has added.
    values += [tf.ones(values[0].shape[:1])] * (len(values) + 1 == len(tensors))
    if len(values) != len(tensors):
        raise ProbeError("the batches of the data are others")
    values = [tf.cast(v[:size], x.dtype) for v, x in zip(values, tensors, strict=True)]
    return values, [*labels, *[False] * (len(values) - len(labels))]


def read_existing(read_batch: ReadBatch, least: int, trace: Trace | None = None) -> Any:
    """Returns the rows of the first batch that exist; they repeat if it has less than `least`.

    Args:
        read_batch: returns the batch and its mask.
        least: the number of rows.
        trace: whose inputs are made up if no batch can be read.
    """
    try:
        batch, mask = read_batch()
    # ValueError: distributed data of the user cannot be read while a replica is traced.
    except (tf.errors.OpError, StopIteration, ValueError) as error:
        if trace is None:
            raise ProbeError("there is no batch to compute it for") from error
        inputs = trace.inputs[0] if isinstance(trace.inputs, tuple) else trace.inputs
        return tf.nest.map_structure(lambda x: tf.constant(row_samples.make(x, least)), inputs)
    if mask is not None:
        batch = tf.nest.map_structure(lambda x: tf.boolean_mask(x, mask > 0), batch)
    rows = tf.nest.flatten(batch)[0].shape[0]
    if rows < 2:
        raise ProbeError("the batch has one row")
    return tf.nest.map_structure(lambda x: tf.gather(x, np.arange(max(rows, least)) % rows), batch)
