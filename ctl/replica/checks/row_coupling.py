"""Rejects losses in which a row of the batch depends on other rows of its replica or micro-batch.

The ops from the batch to the losses are searched while the step is traced; nothing is added to the
graph. An op that may combine rows is a suspect. The losses are then computed for the first batch with
other rows exchanged, once, before the first step: if the loss of a row changes, it is rejected. A
trace with one row cannot show that, so the step is then traced again with several.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import logging
import types
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.autograph import traced
from ctl.errors import UsageError
from ctl.replica.arithmetic import row_mask
from ctl.replica.arithmetic.row_mask import Examples
from ctl.replica.checks import loss_trace, random_search
from ctl.replica.checks.loss_trace import LossTrace, Update, symbolic
from ctl.replica.checks.row_flow import Mixed, RowFlow
from ctl.replica.checks.row_rules import Rows
from ctl.replica.graphs import ops
from ctl.replica.graphs.dataflow import ancestors, outer_tensor

_LOG = logging.getLogger("ctl")
_ACCEPT = "or accept it with allow_row_coupling=True (runtime.allow_row_coupling)"
_FIX = (
    "use ctl.replica.all_gather(x), the rows of the global batch, from which ctl.replica.positions(x) "
    "or ctl.random.permutation_of_batch() select, or ctl.SyncBatchNormalization for statistics"
)
# Ops that turn an integer into a number of a loss, or into a condition.
_NUMBERS = ("Cast", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual")
_OUTPUTS = "outputs"  # what is computed from variables
_ROWS = 4  # of a micro-batch, if the step is traced again
ReadBatch = Callable[[], Any]
Compute = Callable[[Any], Any]

# Relative to the largest value. The shapes are the same, so the same kernels compute a row.
_TOLERANCES = {8: 1e-6, 4: 1e-4, 2: 2e-2}
# Ops that read the data of the run, wait for other replicas, or change a state.
_NOT_COPIED = (
    "Iterator", "MultiDeviceIterator", "Collective", "Nccl", "Assign", "ResourceScatter",
    "ResourceApply", "Queue", "Barrier", "Stage", "Unstage", "Send", "Recv", "_Arg",
)  # fmt: skip


@contextlib.contextmanager
def search(
    rows: Examples, replicas: int, read_batch: ReadBatch, compute: Compute
) -> Iterator[None]:
    """Searches the losses that the code inside the `with` block computes.

    Args:
        rows: the rows of a replica, with a trace; without one nothing is searched.
        replicas: the number of replicas that compute the global batch.
        read_batch: returns the first batch of a replica, like the tensors of the trace, and its mask.
            It may have more rows.
        compute: the code inside, as a function of a batch.

    Raises:
        UsageError: the loss of a row depends on other rows of the replica, or the replicas compute
            different functions of their rows. The message names the user's line of code.
    """
    trace = rows.trace
    if trace is None or rows.graph is None:
        yield
        return
    # On several replicas the first position is computed from the rows of all.
    trace.constants = {
        id(tensor): np.zeros([], tensor.dtype.as_numpy_dtype)
        for tensor in symbolic([rows.first_row, rows.step])
    }
    with trace.record_collectives():
        yield
    # The graph keeps the traces, because it also keeps their tensors.
    traces = [*getattr(rows.graph, "_ctl_loss_traces", ()), trace]
    rows.graph._ctl_loss_traces = traces
    if len(traces) > 1:  # another replica of this process, in the same graph
        difference = loss_trace.compare_replicas(traces[0], trace, len(traces) - 1)
        _check_equal(difference, "replicas")
        return
    try:
        _check_trace(trace, replicas, rows.parts, read_batch)
    except _ProbeError as unknown:
        try:
            with tf.init_scope(), futures.ThreadPoolExecutor(1) as thread:  # in no strategy
                thread.submit(_check_again, rows, replicas, read_batch, compute).result()
        except _ProbeError as error:
            op = error.op or unknown.op
            if op is not None and replicas * rows.parts > 1:
                _LOG.warning(
                    "%s may combine rows of the same replica or micro-batch (%s), which is not known: "
                    "%s. If it does, the update depends on how the batch is split, which `ctl check` "
                    "measures.",
                    random_search.place(op), op.type, error,
                )  # fmt: skip


def _check_trace(trace: LossTrace, replicas: int, parts: int, read_batch: ReadBatch) -> None:
    """Checks the losses of a trace; raises a _ProbeError if the trace cannot show what they are."""
    for update in trace.updates:
        _check_update(trace, update, replicas, parts, read_batch)
        if not loss_trace.has_equal_parts(update):
            raise _ProbeError("no two micro-batches have the same number of rows")
    _check_equal(loss_trace.compare_micro_batches(trace), "micro-batches")


def _check_again(rows: Examples, replicas: int, read_batch: ReadBatch, compute: Compute) -> None:
    """Checks the losses of a step that is traced again, with several rows in each micro-batch."""
    count = _ROWS * rows.parts
    batch = tf.nest.map_structure(lambda x: x[:count], _read_existing(read_batch, count))
    traces: list[LossTrace] = []

    def step(batch: Any) -> None:
        traces.append(trace := LossTrace.of(batch, losses_only=True))
        again = dataclasses.replace(
            rows, row_mask=None, first_row=0, step=0, applied=[], count=count,
            graph=tf.compat.v1.get_default_graph(), single=False, refused=[], folded=[], trace=trace,
        )  # fmt: skip
        with row_mask.replay(again, {}), trace.record_collectives():
            compute(batch)

    try:
        traced(step).get_concrete_function(batch)
    # The code may require the number of rows that it has, or fail once the losses are known.
    except Exception as error:
        updates = [each for trace in traces for each in trace.updates if each.micro_batches]
        if len(updates) < len(rows.trace.updates):
            reason = f"the step cannot be traced with {_ROWS} rows ({type(error).__name__})"
            raise _ProbeError(reason) from error
    _check_trace(traces[0], replicas, rows.parts, lambda: (batch, None))


def _read_existing(read_batch: ReadBatch, least: int) -> Any:
    """Returns the rows of the first batch that exist; they repeat if it has less than `least`."""
    try:
        batch, mask = read_batch()
    # ValueError: distributed data of the user cannot be read while a replica is traced.
    except (tf.errors.OpError, StopIteration, ValueError) as error:
        raise _ProbeError("there is no batch to compute it for") from error
    if mask is not None:
        batch = tf.nest.map_structure(lambda x: tf.boolean_mask(x, mask > 0), batch)
    rows = tf.nest.flatten(batch)[0].shape[0]
    if rows < 2:
        raise _ProbeError("the batch has one row")
    return tf.nest.map_structure(lambda x: tf.gather(x, np.arange(max(rows, least)) % rows), batch)


def check_count(
    losses: Sequence[tf.Tensor], trace: LossTrace | None, read_batch: ReadBatch, *, name: str,
    split: bool, fewer: tuple[Sequence[tf.Tensor], LossTrace] | None = None,
) -> None:  # fmt: skip
    """Rejects losses that depend on the number of rows that a replica or a micro-batch has.

    Such a loss is divided twice, and the first divisor depends on the split. In a trace of a step that
    number is a constant, so the losses of a trace with any number of rows are searched. If a number of
    rows is in them, they are computed for the first batch with and without its last row.

    Args:
        losses: the losses, [rows, ...] each, in a graph in which the number of rows is not known; or,
            with `fewer`, in one for the rows of the first batch.
        trace: the batch of that graph; None to check nothing.
        read_batch: returns the first batch of a replica, like the tensors of the trace, and its mask.
        name: the user's loss function, for the message.
        split: whether the batch is split. If not, a warning is logged.
        fewer: the losses and the batch of a graph for one row less, if the losses require a static
            number of rows.

    Raises:
        UsageError: the loss of a row depends on the number of rows.
    """
    # A row may depend on the rows of all replicas, and so on their number.
    if trace is None or trace.global_values:
        return
    if fewer is None and not any(_counts_rows(each, trace) for each in losses):
        return

    probe = _Probe(losses, trace)
    dropped = _Probe(*fewer) if fewer else probe
    try:
        # A loss that depends on the other rows is rejected by `search`, with a message of its own.
        if not _run(probe, read_batch, None, dropped=dropped) or _run(probe, read_batch, None):
            return
    except _ProbeError:  # it is not known
        return
    line = (
        f"{name} returns losses that depend on the number of rows of a replica or micro-batch, so the "
        "update depends on how the batch is split: return the loss of each row, since ctl divides by "
        f"the weight of the global batch, {_ACCEPT}."
    )
    if split:
        raise UsageError(line)
    _warn(line)


def _counts_rows(losses: tf.Tensor, trace: LossTrace) -> bool:
    """Returns whether losses contain a number of rows, as a float, or a sum over rows."""
    clean = [id(value.output) for value in trace.global_values]
    flow = RowFlow({id(x): Rows(0) for x in trace.batch}, count=None, clean=clean)
    if isinstance(flow.state(losses), Mixed):
        return True
    # A shape that is used as a shape remains an integer.
    stack, seen = [(losses, False)], set()
    while stack:
        tensor, is_cast = stack.pop()
        if (id(tensor), is_cast) in seen or not hasattr(tensor, "op"):
            continue
        seen.add((id(tensor), is_cast))
        op = tensor.op
        # A sum of ones is a number of rows, too. Zeros are the initial states of recurrent layers.
        is_ones = op.type == "OnesLike" or (
            op.type == "Fill" and tf.get_static_value(op.inputs[1]) != 0
        )
        if is_ones or (is_cast and op.type in ("Shape", "ShapeN", "Size")):
            return True
        is_cast |= op.type in _NUMBERS and op.inputs[0].dtype.is_integer
        stack += [(x, is_cast) for x in op.inputs]
    return False


def _check_update(
    trace: LossTrace, update: Update, replicas: int, parts: int, read_batch: ReadBatch
) -> None:
    batch = {id(x): Rows(0) for x in trace.batch}
    clean = [id(value.output) for value in trace.global_values]
    count = trace.batch[0].shape[0] if trace.batch[0].shape.rank else None

    # The undivided batch, up to what `preprocess` and `sample_weight` returned.
    prepared = RowFlow(batch, count=count, clean=clean)
    _check(trace, update, prepared, update.inputs, replicas > 1, count, 1, read_batch)

    part = update.micro_batches[0]
    leading = {id(x): Rows(0) for x in part.rows if x.shape.rank}
    rows = part.size if isinstance(part.size, int) else None

    def resolve(tensor: tf.Tensor) -> tf.Tensor | None:
        alias = update.aliases.get(id(tensor))
        return outer_tensor(tensor) if alias is None else alias

    losses = RowFlow({**batch, **leading}, count=rows, clean=clean, resolve=resolve)
    _check(trace, update, losses, part.losses, replicas * parts > 1, rows, parts, read_batch)


def _check(
    trace: LossTrace, update: Update, flow: RowFlow, values: Sequence[tf.Tensor], split: bool,
    count: int | None, parts: int, read_batch: ReadBatch,
) -> None:  # fmt: skip
    """Raises a UsageError, or warns if the batch is not split, if the rows affect each other."""
    states = [(value, flow.state(value)) for value in values]
    suspects = [(value, state.op) for value, state in states if isinstance(state, Mixed)]
    if not suspects:
        return

    def dependent(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        probe = _Probe(values, trace, update.aliases, flow.statistics)
        return [values[i] for i in sorted(_run(probe, read_batch, count, parts))]

    op = suspects[0][1]
    try:
        losses = dependent([value for value, _ in suspects])
    except _ProbeError as error:
        error.op = op
        raise
    if not losses:
        return
    # The first suspect may be harmless: what it computes shows that.
    with contextlib.suppress(_ProbeError):
        flow = flow.without_suspects(dependent)
        op = getattr(flow.state(losses[0]), "op", op)
    line = (
        f"{random_search.place(op)} combines rows of the same replica or micro-batch "
        f"({_describe_op(trace, flow, op)}), so the loss of a row depends on how the batch is split: "
        f"{_FIX}, {_ACCEPT}."
    )
    if split:
        raise UsageError(line)
    # All rows are those of one replica: the update is right, until the config splits the batch.
    _warn(line)


@functools.cache
def _warn(line: str) -> None:  # several trainers of a process, as of ctl check, have the same loss
    _LOG.warning("%s As long as one replica computes the batch at once, there is no split.", line)


def _run(
    probe: "_Probe", read_batch: ReadBatch, count: int | None, parts: int = 1,
    *, dropped: "_Probe | None" = None,
) -> set[int]:  # fmt: skip
    """Returns which values of a probe depend on other rows, as computed for the first batch.

    Args:
        probe: values of the first of `parts` parts of the batch.
        read_batch: see `search`.
        count: the number of rows of the values; None if the trace accepts any number.
        parts: see `probe`.
        dropped: see `_Probe.depends_on_other_rows`.
    """
    with tf.init_scope():
        tensors = probe.trace.batch
        size = tensors[0].shape[0] if count else None
        values = tf.nest.flatten(_read_existing(read_batch, size or 2 * parts))
        # The row mask, or weights that the step has added.
        values += [tf.ones(values[0].shape[:1])] * (len(values) + 1 == len(tensors))
        if len(values) != len(tensors):
            raise _ProbeError("the batches of the data are others")
        values = [tf.cast(v[:size], x.dtype) for v, x in zip(values, tensors, strict=True)]
        rows = count or values[0].shape[0] // parts
        if rows < 2:
            raise _ProbeError("a micro-batch has one row")
        return probe.depends_on_other_rows(values, rows, dropped=dropped)


def _describe_op(trace: LossTrace, flow: RowFlow, op: Any) -> str:
    """Names an op that combines rows, with the shapes that it broadcasts.

    Raises:
        UsageError: it combines labels [rows] and outputs [rows, 1], which is wrong on any split.
    """
    operands = [x for x in op.inputs if isinstance(flow.state(x), Rows)]
    if op.type not in ops.ELEMENTWISE or len(operands) != 2:
        return op.type
    shown = " and ".join(f"{_describe(x, trace)} {tuple(x.shape)}" for x in operands)
    low, high = sorted(operands, key=lambda x: x.shape.rank)
    is_pair = [_describe(x, trace) for x in operands].count(_OUTPUTS) == 1 and high.shape[-1] == 1
    if not is_pair or low.shape.rank == high.shape.rank or _inserts_axis(high):
        return f"{op.type} of {shown}"  # such as x[:, None] - x, the differences of all pairs
    fix = f"use {_describe(high, trace)}[{':, ' * (high.shape.rank - 1)}0]"
    raise UsageError(
        f"{random_search.place(op)}: {shown} broadcast to {tuple(op.outputs[0].shape)} ({op.type}), so "
        f"each row meets the other rows: {fix}."
    )


def _inserts_axis(tensor: tf.Tensor) -> bool:
    """Returns whether an op before a tensor, other than elementwise ones, keeps or inserts an axis."""
    op = tensor.op
    if op.type in ops.ELEMENTWISE:
        return any(_inserts_axis(x) for x in op.inputs if x.shape.rank == tensor.shape.rank)
    names = {"StridedSlice": "new_axis_mask", "Sum": "keep_dims", "Mean": "keep_dims"}
    inserts = op.type in names and op.get_attr(names[op.type])
    return bool(inserts) or op.type in ("ExpandDims", "Reshape")


def _describe(tensor: tf.Tensor, trace: LossTrace) -> str:
    """Names the origin of a tensor: the model, or an entry of the batch."""
    sources = list(ancestors(tensor))
    if any(x.op.type in ("ReadVariableOp", "ResourceGather") for x in sources):
        return _OUTPUTS
    names = {trace.names[id(x)] for x in sources if id(x) in trace.names}
    return f'batch["{names.pop()}"]' if len(names) == 1 else "data"


def _check_equal(difference: loss_trace.Difference | None, parts: str) -> None:
    if difference is None:
        return
    one, two = difference.values
    raise UsageError(
        f"{random_search.place(difference.op)} is {one} in one of the {parts} and {two} in another: "
        "code in Python, such as a counter, runs once for each of them, while the step is traced. Use "
        f"self.global_step, or a tf.Variable, {_ACCEPT}."
    )


def make_trace(inputs: Any, *, allow: bool) -> LossTrace | None:
    """Returns the trace of a step that computes a replica's batch; None if it is not searched.

    Args:
        inputs: the tensors of the batch, and the mask.
        allow: whether rows may depend on each other.
    """
    return None if allow or not symbolic(inputs) else LossTrace.of(inputs)


_FAILURES = (tf.errors.OpError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)


class _ProbeError(Exception):
    """The values cannot be computed.

    Attributes:
        op: the op that may combine rows, if it is known.
    """

    op: Any = None


class _Probe:
    """Computes values from the batch of one replica.

    Values of the global batch (sums over the replicas) and statistics of batch normalizations stay as
    they are for the first batch, so that only dependence within the replica is seen.

    Args:
        values: [rows, ...] tensors of the step.
        trace: the batch, the sums over the replicas, and the values of other tensors.
        aliases: the id of a tensor -> the tensor that it stands for.
        statistics: the ops of batch normalizations that combine rows.
    """

    def __init__(
        self,
        values: Sequence[tf.Tensor],
        trace: LossTrace,
        aliases: Mapping[int, tf.Tensor] = types.MappingProxyType({}),
        statistics: Sequence[Any] = (),
    ):
        self.trace = trace
        self._values, self._aliases = values, aliases
        self._global = {id(value.output): value for value in trace.global_values}
        self._statistics = {id(output): op for op in statistics for output in op.outputs}
        self._fixed: list[tf.Tensor] = []

    def depends_on_other_rows(
        self, batch: Sequence[Any], rows: int, *, dropped: "_Probe | None" = None
    ) -> set[int]:
        """Returns the positions of the values that change for a row if other rows of the batch change.

        Args:
            batch: the values of the batch, of the first `rows` rows, which exist.
            rows: the number of rows of the values, at least 2.
            dropped: instead of changing other rows, drop the last one, and compute the values of this
                probe.

        Raises:
            _ProbeError: the values cannot be computed, or differ from one computation to the next.
        """
        changing: set[int] = set()
        try:
            observe = tf.function(self._observe, autograph=False)
            compute = tf.function(self._compute, autograph=False)
            fixed = observe(batch)
            reference = compute(batch, fixed)
            everything = np.arange(rows)
            if _differ(reference, compute(batch, fixed), everything):
                raise _ProbeError("its numbers are not the same each time")
            if dropped:
                compute = tf.function(dropped._compute, autograph=False)
                fewer = compute([values[: rows - 1] for values in batch], fixed)
                return _differ([x[: rows - 1] for x in reference], fewer, everything[:-1])
            for kept in _kept_rows(rows, reference):
                changed = compute(_replace_others(batch, kept), fixed)
                changing |= _differ(reference, changed, kept)
                if len(changing) == len(reference):
                    break
        except _FAILURES as error:
            raise _ProbeError(type(error).__name__) from error
        return changing

    def _observe(self, batch: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Computes the values that stay constant for the other batches."""
        copy = _Copy(self, self._known(batch))
        for value in self._values:
            copy.tensor(value)
        self._fixed = copy.reached
        return [copy.tensor(tensor) for tensor in self._fixed]

    def _compute(self, batch: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        known = self._known(batch) | dict(zip(map(id, self._fixed), fixed, strict=True))
        copy = _Copy(self, known, fixed=True)
        return [copy.tensor(value) for value in self._values]

    def _known(self, batch: Sequence[tf.Tensor]) -> dict[int, Any]:
        constants = {k: tf.convert_to_tensor(value) for k, value in self.trace.constants.items()}
        return constants | dict(zip(map(id, self.trace.batch), batch, strict=True))


class _Copy:
    """Copies ops into the graph that is being traced.

    Attributes:
        reached: the values of the global batch, and the statistics, that the copied ops read.
    """

    def __init__(self, probe: "_Probe", known: dict[int, Any], *, fixed: bool = False):
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
                raise _ProbeError("its inputs are not known")
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
                raise _ProbeError(f"it reads or changes a state ({each.type})")
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
