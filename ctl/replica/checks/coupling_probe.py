"""Computes values of a traced step for several batches, to see whether its rows affect each other.

The ops that compute the values are copied from the graph of the step into a function of their own, so
that no Python code of the user runs a second time, and nothing is assigned.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.replica.checks.loss_trace import GlobalValue

# Relative to the largest value. The shapes are the same, so the same kernels compute a row.
_TOLERANCES = {8: 1e-6, 4: 1e-4, 2: 2e-2}
# Ops that read the data of the run, wait for other replicas, or change a state.
_NOT_COPIED = (
    "Iterator", "MultiDeviceIterator", "Optional", "Collective", "Nccl", "Assign", "ResourceScatter",
    "ResourceApply", "Queue", "Barrier", "Stage", "Unstage", "Send", "Recv", "_Arg", "Placeholder",
)  # fmt: skip


class ProbeError(Exception):
    """The values cannot be computed."""


class Probe:
    """Computes values from the batch of one replica.

    Values of the global batch (sums over the replicas) and statistics of batch normalizations stay as
    they are for the first batch, so that only dependence within the replica is seen.

    Args:
        values: [rows, ...] tensors of the step.
        batch: the tensors of the replica's batch.
        constants: the id of another tensor -> its value.
        aliases: the id of a tensor -> the tensor that it stands for.
        global_values: sums over the replicas.
        statistics: the ops of batch normalizations that combine rows.
    """

    def __init__(
        self,
        values: Sequence[tf.Tensor],
        batch: Sequence[tf.Tensor],
        *,
        constants: Mapping[int, Any],
        aliases: Mapping[int, tf.Tensor],
        global_values: Sequence[GlobalValue],
        statistics: Sequence[Any],
    ):
        self._values, self._batch, self._aliases = values, batch, aliases
        self._constants = constants
        self._global = {id(value.output): value for value in global_values}
        self._statistics = {id(output): op for op in statistics for output in op.outputs}
        self._fixed: list[tf.Tensor] = []

    def depends_on_other_rows(self, batch: Sequence[Any], rows: int) -> bool:
        """Returns whether a value of a row changes if other rows of the batch change.

        Args:
            batch: the values of the batch, of the first `rows` rows, which exist.
            rows: the number of rows of the values, at least 2.

        Raises:
            ProbeError: the values cannot be computed, or differ from one computation to the next.
        """
        try:
            observe = tf.function(self._observe, autograph=False)
            compute = tf.function(self._compute, autograph=False)
            fixed = observe(batch)
            reference = compute(batch, fixed)
            everything = np.arange(rows)
            if _differ(reference, compute(batch, fixed), everything):
                raise ProbeError("its numbers are not the same each time")
            for kept in _kept_rows(rows, reference):
                changed = compute(_replace_others(batch, kept), fixed)
                if _differ(reference, changed, kept):
                    return True
        except (
            tf.errors.OpError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:
            raise ProbeError(f"{type(error).__name__}") from error
        return False

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
        constants = {k: tf.convert_to_tensor(value) for k, value in self._constants.items()}
        return constants | dict(zip(map(id, self._batch), batch, strict=True))


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
        if op.type.startswith(_NOT_COPIED) or op.type.endswith("Send"):
            raise ProbeError(f"it reads or changes a state ({op.type})")
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


def _differ(one: Sequence[Any], two: Sequence[Any], rows: np.ndarray) -> bool:
    """Returns whether the entries of some rows differ by more than rounding."""
    return any(_differs(a.numpy(), b.numpy(), rows) for a, b in zip(one, two, strict=True))


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
