"""Follows the rows of a batch through the ops of a traced step.

For each tensor that is computed from a batch, `RowFlow` finds the axis that holds the rows, or the op
that combined several rows. It knows the ops that compute a row from that row alone; every other op
counts as one that combines rows, so a result of `Mixed` means "perhaps".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import os
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.checks import row_rules
from ctl.checks.row_rules import Place
from ctl.graphs import ops
from ctl.graphs.dataflow import ancestors, outer_tensor

_NORMALIZATIONS = (
    # The end of the paths of both packages, keras and tf_keras.
    os.path.join("keras", "src", "layers", "normalization", "batch_normalization.py"),
    os.path.join("ctl", "rows", "moments.py"),
)
_STATISTICS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "Mean", "Sum")
# Sums over the replicas that user code may contain.
_COLLECTIVES = (
    "CollectiveAllToAllV2", "CollectiveGather", "CollectiveGatherV2", "CollectiveReduce",
    "CollectiveReduceV2", "CollectiveReduceV3", "CrossReplicaSum", "NcclAllReduce", "XlaAllReduce",
)  # fmt: skip
# Ops that combine the entries of their inputs that have the same place on the axis of the rows.
_PAIRING = ops.ELEMENTWISE | {
    "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "ConcatV2", "Einsum", "Pack", "Select",
    "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits",
}  # fmt: skip
# Ops that count the places of an axis, or select by them.
_PLACES = (
    "Cumsum", "MatrixBandPart", "MatrixDiag", "MatrixDiagV2", "MatrixDiagV3", "MatrixSetDiag",
    "MatrixSetDiagV2", "MatrixSetDiagV3", "Range", "Where",
)  # fmt: skip
_PARTS = ("ConcatV2", "GatherV2", "Pack", "ResourceGather", "Slice", "StridedSlice")
_MAX_ITERATIONS = 4  # of a loop's body, until the axes of its variables are known


class Mixed(NamedTuple):
    """A value in which each entry depends on several rows: the op that combined them first."""

    op: Any


State = Place | Mixed | None  # None: does not depend on the batch
Resolve = Callable[[tf.Tensor], tf.Tensor | None]


class RowFlow:
    """The states of the tensors of one graph, and of its enclosing graphs.

    Args:
        sources: the id of a tensor of a batch -> its state; the tensors must be kept alive.
        count: the number of rows; None if it is known only when the step runs.
        clean: ids of tensors that are the same function of the global batch on every split.
        resolve: returns the tensor that a placeholder stands for.
        row_wise: tensors whose rows are computed one by one, each with the tensors of the rows.

    Attributes:
        statistics: the ops that computed statistics of a batch normalization.
    """

    def __init__(
        self,
        sources: Mapping[int, State],
        *,
        count: int | None,
        clean: Iterable[int] = (),
        resolve: Resolve = outer_tensor,
        row_wise: Sequence[tuple[tf.Tensor, Sequence[tf.Tensor]]] = (),
    ):
        self._row_wise = row_wise
        self._inputs = {id(output): inputs for output, inputs in row_wise}
        self._count = count
        self._clean = frozenset(clean)
        self._resolve = resolve
        self._sources = sources
        self._states: dict[int, State] = {**dict.fromkeys(self._clean), **sources}
        self._keep: list[Any] = []  # ids are unique only while the tensors exist
        self.statistics: list[Any] = []

    def state(self, tensor: tf.Tensor) -> State:
        """Returns where a tensor holds the rows."""
        if not hasattr(tensor, "op"):  # eager
            return None
        states, stack = self._states, [tensor]
        while stack:
            top = stack[-1]
            if id(top) in states:
                stack.pop()
                continue
            op = top.op
            inputs = self._inputs.get(id(top), op.inputs)
            if not len(inputs):
                outer = self._resolve(top) if op.type == "Placeholder" else None
                inputs = () if outer is None else (outer,)
            unknown = [x for x in inputs if id(x) not in states and hasattr(x, "op")]
            if unknown:
                stack.extend(unknown)
                continue
            known = [states.get(id(x)) for x in inputs]
            outputs = [known[0]] if op.type == "Placeholder" and known else self._apply(op, known)
            if id(top) in self._inputs:
                moved = [each for each in known if each not in (Place(0), None)]
                outputs = [Mixed(op) if moved else Place(0)]
            for output, state in zip(op.outputs, outputs, strict=True):
                states.setdefault(id(output), state)  # a clean output stays clean
            self._keep.append(op)
            stack.pop()
        return states[id(tensor)]

    def suspects(self, values: Iterable[tf.Tensor]) -> list[tuple[tf.Tensor, Any]]:
        """Returns the values that perhaps depend on other rows, each with the op that combines them."""
        states = [(value, self.state(value)) for value in values]
        mixed = [(value, state.op) for value, state in states if isinstance(state, Mixed)]
        return mixed + [(x, x.op) for x, s in states if s is None and self.uses_places(x)]

    def without_suspects(
        self, dependent: Callable[[list[tf.Tensor]], list[tf.Tensor]]
    ) -> "RowFlow":
        """Returns a flow that knows which tensors with an entry per row depend on one row only.

        Args:
            dependent: returns those of some tensors that depend on other rows.
        """
        mixed = {
            id(x): x for op in self._keep for x in op.outputs
            if isinstance(self._states.get(id(x)), Mixed) and x.shape.rank
            and x.shape[0] == self._count and x.dtype not in (tf.variant, tf.resource)
        }  # fmt: skip
        rows = dict.fromkeys(mixed.keys() - {id(x) for x in dependent([*mixed.values()])}, Place(0))
        sources = {**self._sources, **rows}
        return RowFlow(
            sources, count=self._count, clean=self._clean, resolve=self._resolve,
            row_wise=self._row_wise,
        )  # fmt: skip

    def _apply(self, op: Any, states: Sequence[State]) -> Sequence[State]:
        """Returns the states of an op's outputs."""
        kind, outputs = op.type, len(op.outputs)
        if kind in _COLLECTIVES or not any(states):
            return [None] * outputs
        if kind in ops.SHAPES:
            # The number of entries that an op selects, such as tf.where, depends on the rows.
            is_known = [x.shape.is_fully_defined() for x in op.inputs]
            pairs = zip(states, is_known, strict=True)
            return [None if known or not isinstance(s, Mixed) else s for s, known in pairs]
        if kind in ops.FUNCTIONS:
            with contextlib.suppress(ValueError):  # other arguments than the op has inputs
                # A function whose gradient was computed may have further results, at the end.
                results = [*self._call(op, states)][:outputs]
                if len(results) == outputs:
                    return results
            return [Mixed(op)] * outputs
        mixed = next((state for state in states if isinstance(state, Mixed)), None)
        if mixed is not None:
            # Also the statistics of rows that are in two views, or combined in another way before.
            if is_statistics(op):
                return self._statistics(op, states)
            return [mixed] * outputs
        places = [state if isinstance(state, Place) else None for state in states]
        rows = row_rules.apply(op, places, self._count)
        if rows is not None:
            return [Mixed(op)] * outputs if self._pairs_places(op, places) else rows
        return self._statistics(op, states) if is_normalization(op) else [Mixed(op)] * outputs

    def uses_places(self, tensor: tf.Tensor) -> bool:
        """Returns whether a value is perhaps one for each place in the replica, whatever row is there.

        Args:
            tensor: a tensor that does not depend on the batch, except by values of the global batch.
        """
        sources = list(ancestors(tensor))
        if any(ops.KEYED_BITS in x.op.name for x in sources):  # keyed by the position of a row
            return False
        return any(id(x) in self._clean or self._differ(x.op) for x in sources)

    def _differ(self, op: Any) -> bool:
        """Returns whether an op makes, or takes of a table, other entries for each place on an axis."""
        if any(x.type in ops.STATELESS for x in ops.with_called([op])):
            return True
        if op.type != "Const":
            parts = [x for x in op.outputs if x.dtype.is_floating and x.shape.rank]
            is_part = op.type in _PARTS and any(x.shape[0] == self._count for x in parts)
            return op.type in _PLACES or is_part
        value = tf.make_ndarray(op.get_attr("value"))
        return value.ndim > 0 and len(value) == self._count and bool((value != value[:1]).any())

    def _pairs_places(self, op: Any, places: row_rules.States) -> bool:
        """Returns whether an op perhaps combines each row with a value for its place in the replica."""
        rank = op.outputs[0].shape.rank
        if op.type not in _PAIRING or rank is None:
            return False
        size = {
            self._count and self._count * (place.inner * place.views if place else 1)
            for place in places
        }
        axes = {
            place.axis - (x.shape.rank if op.type in ops.ELEMENTWISE else 0)
            for x, place in zip(op.inputs, places, strict=True) if place
        }  # fmt: skip
        return any(
            place is None and x.shape.rank and -x.shape.rank <= axis < x.shape.rank
            and x.shape[axis] in (size - {1} | {None}) and self.uses_places(x)
            for x, place in zip(op.inputs, places, strict=True) for axis in axes
        )  # fmt: skip

    def _statistics(self, op: Any, states: Sequence[State]) -> Sequence[State]:
        """Returns the outputs of an op of a batch normalization that combines rows."""
        self.statistics.append(op)
        outputs: list[State] = [None] * len(op.outputs)
        if op.type.startswith("FusedBatchNorm"):
            outputs[0] = states[0]
        return outputs

    def _call(self, op: Any, states: Sequence[State]) -> Sequence[State]:
        """Returns the states of the outputs of functions that an op calls."""
        graphs = [graph for _, graph in ops.called_graphs(op)]
        if not graphs:  # a function that was loaded from a SavedModel has no graph
            return [Mixed(op)] * len(op.outputs)
        if op.type in ops.CALLS:
            return self._run(graphs[0], states)
        if op.type.endswith("While"):
            return self._loop(op, graphs[0], graphs[1], states)
        results = [self._run(graph, states[1:]) for graph in graphs]
        joined = [_join(op, column) for column in zip(*results, strict=True)]
        return joined if states[0] is None else [_as_mixed(op, states[0])] * len(joined)

    def _loop(self, op: Any, condition: Any, body: Any, states: Sequence[State]) -> Sequence[State]:
        for _ in range(_MAX_ITERATIONS):
            before, results = states, self._run(body, states)
            states = [_join(op, pair) for pair in zip(states, results, strict=True)]
            if list(states) == list(before):
                break
        else:
            return [Mixed(op)] * len(op.outputs)
        # How often the body runs must not depend on the rows either.
        (stops,) = self._run(condition, states)
        return states if stops is None else [_as_mixed(op, stops)] * len(op.outputs)

    def _run(self, graph: Any, states: Sequence[State]) -> list[State]:
        sources = {id(x): state for x, state in zip(graph.inputs, states, strict=True)}
        inner = RowFlow(
            sources, count=self._count, clean=self._clean, resolve=lambda _: None,
            row_wise=self._row_wise,
        )  # fmt: skip
        return [inner.state(output) for output in graph.outputs]


def is_statistics(op: Any) -> bool:
    """Returns whether an op computes statistics of a batch normalization, or counts their elements."""
    is_number = op.type == "Cast" and op.outputs[0].shape.rank == 0
    return (is_number or op.type in _STATISTICS) and is_normalization(op)


def is_normalization(op: Any) -> bool:
    """Returns whether an op belongs to a batch normalization, of ctl or (with a warning) Keras."""
    return any(frame.filename.endswith(_NORMALIZATIONS) for frame in op.traceback)


def _join(op: Any, states: Sequence[State]) -> State:
    """Returns the state of a value that has one of several states."""
    distinct = {state for state in states if state is not None}
    mixed = next((state for state in distinct if isinstance(state, Mixed)), None)
    if mixed is not None or not distinct:
        return mixed
    return distinct.pop() if len(distinct) == 1 else Mixed(op)


def _as_mixed(op: Any, state: State) -> Mixed:
    return state if isinstance(state, Mixed) else Mixed(op)
