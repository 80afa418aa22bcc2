"""The probe: computes values of a traced step for some batches, with other rows exchanged."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import types
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.checks import row_samples
from ctl.checks.graph_copier import (
    FAILURES,
    LATE,
    Computation,
    CopiedTrace,
    GraphCopier,
    ProbeError,
    has_mask,
)
from ctl.checks.read_batches import ReadBatch, read_values
from ctl.rows.trace import Trace, symbolic

# Relative to the largest value. The shapes are the same, so the same kernels compute a row.
_TOLERANCES = {8: 1e-6, 4: 1e-4, 2: 2e-2}
_FIRST = np.int64(0)  # the position of the first row of the replica
_LATE = (LATE, LATE + 1, 3, 100)


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
        shifted: Sequence[tf.Tensor] = (),
    ):
        self.values, self.trace = values, trace
        self.by_place: set[int] = set()
        self.constant: set[int] = set()
        self.source = CopiedTrace(trace, first, aliases, statistics, positions or (), shifted)
        self._moves = positions is not None
        self._fixed: list[tf.Tensor] = []
        self._observed = Computation(self._observe)
        self._computed = Computation(self._compute)
        self._summed = Computation(self._totals)
        self._flags: list[bool] = []  # in all batches until now

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
        self.source.set_counters(number)
        return self._computed(batch, fixed, _FIRST)

    def observe(self, batch: Sequence[Any]) -> Any:
        """Computes the values that stay constant for the other batches."""
        self.source.set_counters(None)
        return self._observed(batch, _FIRST)

    def is_changed_by(self, shifted: "Probe", batch: Sequence[Any], labels: Sequence[bool]) -> bool:
        """Returns whether a probe of the same values, with shifted tensors, computes other ones."""
        rows = np.arange(batch[0].shape[0])
        for sample in [batch, *(sample for sample, _ in self._samples(batch, (), labels))]:
            with contextlib.suppress(*FAILURES):
                if differ(self.compute(sample), shifted.compute(sample), rows):
                    return True
        return False

    def is_sum_of_rows(
        self,
        batch: Sequence[Any],
        labels: Sequence[bool],
        *,
        masks: Sequence[int] | None = None,
    ) -> bool:
        """Returns whether each value is a sum of a term of each row, such as a gradient.

        If two batches exchange rows, the sum of their two values then stays the same.

        Args:
            batch: the values of a batch.
            labels: which of them are labels.
            masks: the positions of the masks of rows. If given, the terms must not depend on the places
                of rows either, and must be 0 for padding.
        """
        fixed = self.observe(batch)
        earlier: Sequence[Any] = [np.roll(x, 1, axis=0) for x in batch]
        for sample, number in [(batch, None), *self._samples(batch, (), labels)]:
            pairs = [*zip(sample, earlier, strict=True)]
            others = [[combine(*pair, slice(i, None, 2)) for pair in pairs] for i in (0, 1)]
            compared = [([sample, earlier], others)]
            if masks is not None:
                compared.append(([sample], [[np.roll(x, 1, axis=0) for x in sample]]))
            if masks:
                compared.append(([_with_masks(sample, masks, [1])], [
                    _with_masks(sample, masks, exists) for exists in ([0, 1], [1, 0])
                ]))  # fmt: skip
            with contextlib.suppress(*FAILURES):  # the code may reject rows that are made up
                self.source.set_counters(number)
                for each in compared:
                    one, two = (sum(self._summed(x, fixed, _FIRST) for x in part) for part in each)
                    if differ([one], [two], ..., finite=True):
                        return False
            earlier = sample
        return True

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
            uses = self.source.uses
            compared = uses.compared(labels)
            made = [*row_samples.vary(values[0], labels, uses.constants, self._flags, compared)]
            if has_mask(self.trace):
                made = [[*each[:-1], values[0][-1]] for each in made]
        yield from ((each, None) for each in made)
        late = [*_LATE, *map(int, self.source.uses.constants)] if self.source.has_counters else []
        yield from ((made[i % len(made)], number) for i, number in enumerate(late) if made)

    def _move(
        self, batch: Sequence[Any], fixed: Any, reference: Sequence[Any], *, finite: bool
    ) -> None:
        """Lets the replica begin one row later: the loss of each row is then in the place before."""
        if not self._moves:
            return

        pairs = zip(self._fixed, fixed, strict=True)
        moves = [_move(x) if id(tensor) in self.source.positions else x for tensor, x in pairs]
        moved = self._computed([_move(x) for x in batch], moves, _FIRST + 1)
        before, after = [x[1:] for x in reference], [x[:-1] for x in moved]
        self.by_place |= differ(before, after, np.arange(before[0].shape[0]), finite=finite)

    def _observe(self, batch: Sequence[tf.Tensor], first: tf.Tensor) -> list[tf.Tensor]:
        copy = GraphCopier(self.source, self.source.known(batch, first))
        for value in self.values:
            copy.tensor(value)
        self._fixed = copy.reached
        return [copy.tensor(tensor) for tensor in self._fixed]

    def _compute(
        self, batch: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor], first: tf.Tensor
    ) -> list[tf.Tensor]:
        known = self.source.known(batch, first)
        known |= dict(zip(map(id, self._fixed), fixed, strict=True))
        copy = GraphCopier(self.source, known, fixed=True)
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


def _with_masks(
    batch: Sequence[Any], masks: Sequence[int], exists: Sequence[int]
) -> list[Any]:  # fmt: skip
    """Returns a batch in which rows exist in turns."""
    result = [*batch]
    for place in masks:
        mask = np.asarray(batch[place])
        result[place] = np.resize(exists, mask.shape).astype(mask.dtype)
    return result


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
