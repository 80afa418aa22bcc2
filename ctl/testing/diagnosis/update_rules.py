"""Recognizes mistakes by how much each part of the loss counts in an update."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.testing.diagnosis import causes
from ctl.testing.diagnosis.evidence import Evidence, Finding
from ctl.testing.equivalence_report import Difference, as_fraction, common_factor
from ctl.testing.loop_record import LoopRecord
from ctl.testing.splits import Split
from ctl.testing.subjects.base import Terms, attempt

_PART_OF_WEIGHTS = causes.WEIGHTS.format(times="more than once")
_CLOSE = 1e-4  # relative; coefficients solve a least-squares problem and lose digits
# Precision -> what multiplies gradients, a power of two, and the relative error of such an update.
_TINY = {"float64": (2.0**-20, _CLOSE), "float32": (2.0**-8, 1e-2)}
_COUNTED = causes.DENOMINATOR.partition("{")[0]
_ROUNDING = 1e-9  # a smaller multiple of the weights is a rounding error


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The factors of the terms of an update, relative to one replica.

    Attributes:
        rows: [batch] the factor of each row.
        penalty: the factor of the gradient of the regularization losses, or of the multiple of the
            weights that is added on one replica; 1 if there is none, infinity if it is larger than 1 and
            not known.
    """

    rows: np.ndarray
    penalty: float = 1.0


def explain_update(evidence: Evidence, differences: Sequence[Difference]) -> Finding | None:
    """Recognizes how the updates are scaled.

    Later updates of a step, such as of the generator of a GAN, follow from those before them.
    """
    split, groups = differences[0].split, evidence.run.update_order
    together = [{d.name for d in differences if d.split == split and d.name in g} for g in groups]
    if updated := next(filter(None, together), None):
        differences = [d for d in differences if d.name in updated]
    first = differences[0]
    cause = attempt(lambda: explain_clipping(evidence, split)) or _explain_parts(
        evidence, differences
    )
    if (cause is None or cause.startswith(_COUNTED)) and attempt(
        lambda: _depends_on_replica(evidence, split)
    ):
        return first, causes.PYTHON
    if cause and cause != _PART_OF_WEIGHTS:
        return first, cause
    # Before `explain_partial`: one factor of all updates of a model also grows with the replicas.
    finding = _explain_other_model(differences)
    cause = cause or explain_partial(evidence)
    return finding or ((first, cause) if cause else None)


def _explain_parts(evidence: Evidence, differences: Sequence[Difference]) -> str | None:
    """Explains the coefficients on the first split and on the first uneven one."""
    split = differences[0].split
    uneven = [d.split for d in differences if not d.split.even]
    uneven = [s for s in uneven if s.replicas == split.replicas] or uneven
    coefficients = {}
    for each in dict.fromkeys([split, *uneven[:1]]):
        record, reference = evidence.records[each], evidence.references[each.batch]
        terms = attempt(functools.partial(evidence.subject.terms, each.batch, reference.names))
        if terms and (solution := solve(terms, record, reference)):
            coefficients[each] = solution
    if split not in coefficients:
        return None
    cause = explain_coefficients(coefficients, split, pads=evidence.subject.pads_rows)
    losses = [d for d in evidence.of_kind("loss") if d.split == split]
    # A loss of the same factor is divided by too little; a sum of the gradients does not change it.
    if cause == causes.REDUCED_TWICE and any(d.has_factor(split.replicas) for d in losses):
        return causes.MEANS_OR_TWICE
    return cause


def _depends_on_replica(evidence: Evidence, split: Split) -> bool:
    """Returns whether the update changes if the replicas exchange their rows, of which all have as many.

    On one replica it must not change, as it does by random numbers that are keyed by the row.
    """
    if split.replicas < 2:
        return False
    rows = split.rows_per_replica
    even = Split(rows * split.replicas, split.replicas)
    order = [i % evidence.subject.count for i in range(even.batch)]
    orders = order, order[rows:] + order[:rows]
    subjects = [evidence.subject.select(each) for each in orders]
    names = evidence.references[split.batch].names

    def is_changed(each: Split) -> bool:
        one, other = (s.start(each).record(names, steps=1).flat_update() for s in subjects)
        return not _is_close(other, one, _CLOSE)

    return is_changed(even) and not is_changed(even.reference)


def solve(terms: Terms, record: LoopRecord, reference: LoopRecord) -> Coefficients | None:
    """Returns how much each term counts in the first update, or None if there is no solution.

    Args:
        terms: the terms of the update on one replica.
        record: the record of a split.
        reference: the record of the same batch on one replica.
    """
    solution = _combine(terms, reference, record)
    n, weights = terms.rows.shape[1], slice(-terms.weights.shape[1], None)
    if solution is None or not solution[0, :n].all():
        return None
    expected, actual = solution
    extra = actual[weights] - expected[weights]
    penalty = 1.0
    if not terms.penalty.size:  # the weights of each variable by themselves
        penalty = math.inf if np.abs(extra).max() > _CLOSE else 1.0
    elif abs(expected[-1]) > _ROUNDING:
        penalty = 1 + extra[0] / expected[-1]
    if terms.penalty.any() and abs(penalty - 1) <= _CLOSE:
        penalty = actual[n] / expected[n] if expected[n] else math.inf
    return Coefficients(actual[:n] / expected[:n], penalty)


def _combine(terms: Terms, *records: LoopRecord) -> np.ndarray | None:
    """Returns [records, terms] coefficients of the terms in the first updates, by least squares."""
    steps = [record.steps[0] for record in records]
    names = terms.names or tuple(name for name in steps[0] if name[0] == "update")
    if not all(name in step for step in steps for name in names):
        return None
    targets = np.array([np.concatenate([step[name].ravel() for name in names]) for step in steps])
    targets = targets.astype(np.float64).T
    matrix = np.concatenate([terms.rows, terms.penalty, terms.weights], axis=1)
    norms = np.linalg.norm(matrix, axis=0)
    if not np.isfinite(norms).all() or not np.isfinite(targets).all():
        return None
    used = norms > 0
    scaled = matrix[:, used] / norms[used]
    solution, _, rank, _ = np.linalg.lstsq(scaled, targets, rcond=1e-9)
    errors = np.linalg.norm(scaled @ solution - targets, axis=0)
    if rank < used.sum() or (errors > terms.error * np.linalg.norm(targets, axis=0)).any():
        return None
    result = np.zeros([len(records), len(norms)])
    result[:, used] = solution.T / norms[used]
    return result


def explain_coefficients(
    coefficients: Mapping[Split, Coefficients], split: Split, *, pads: bool = True
) -> str | None:
    """Returns the cause that gives rows, regularization and weights their coefficients.

    Args:
        coefficients: the coefficients of the first split that differs, and of an uneven split if any.
        split: the first split that differs.
        pads: whether replicas get padding rows.
    """
    first = coefficients[split]
    if _all_close(first.rows, 1.0):
        if abs(first.penalty - 1) <= _CLOSE:
            return None
        is_known = first.penalty < math.inf
        times = f"{as_fraction(first.penalty)} times" if is_known else "more than once"
        return causes.WEIGHTS.format(times=times)
    uneven = next((each for each in coefficients if not each.even), None)
    cause = _explain_uneven_rows(coefficients[uneven].rows, uneven, pads) if uneven else None
    if cause and split.micro_batches == 1:
        return cause
    if _all_close(first.rows, first.rows[0]):
        known = {split.micro_batches: causes.MICRO_BATCH, 1 / split.replicas: causes.AVERAGED}
        known[split.replicas] = causes.MEANS_OR_TWICE
        if uneven and _all_close(coefficients[uneven].rows, uneven.replicas):
            known[split.replicas] = causes.REDUCED_TWICE
        matches = (k for k in known if k != 1 and abs(first.rows[0] / k - 1) < _CLOSE)
        times = as_fraction(float(first.rows[0]))
        return known.get(next(matches, 0)) or causes.DENOMINATOR.format(times=times)
    sizes = _micro_batch_sizes(split)
    if split.replicas == 1 and _all_close(first.rows * sizes, first.rows[0] * sizes[0]):
        return causes.MICRO_BATCH
    factors = ", ".join(as_fraction(float(factor)) for factor in first.rows)
    return causes.DENOMINATOR.format(times=factors)


def explain_clipping(evidence: Evidence, split: Split) -> str | None:
    """Recognizes that each replica clips its own gradients.

    Tiny gradients are below every clip: then the split gives the update of one replica. So does the
    difference of two such updates, which contains no weight decay that would hide the gradients.
    """
    wrong, right = evidence.records[split].flat_update(), evidence.references[split.batch]
    tiny, error = _TINY[evidence.subject.precision]
    if split.replicas == 1 or _is_close(wrong, right.flat_update(), _CLOSE):
        return None

    def measure(each: Split, factor: float) -> np.ndarray:
        with _scale_gradients(factor):
            return evidence.subject.start(each).record(right.names, steps=1).flat_update()

    one, several = (
        [measure(each, factor) for factor in (tiny, 2 * tiny)] for each in (split.reference, split)
    )
    growth = one[1] - one[0]
    is_same = _is_close(several[0], one[0], error) and growth.any()
    return causes.CLIPPED if is_same and _is_close(several[1] - several[0], growth, error) else None


def _is_close(values: np.ndarray, expected: np.ndarray, error: float) -> bool:
    return bool(np.linalg.norm(values - expected) <= error * np.linalg.norm(expected))


@contextlib.contextmanager
def _scale_gradients(factor: float) -> Iterator[None]:
    """Multiplies what every tape returns, while a loop is traced and run."""
    original = tf.GradientTape.gradient

    def gradient(*args: Any, **options: Any) -> Any:
        def scale(value: Any) -> Any:
            return None if value is None else tf.math.scalar_mul(factor, value)

        return tf.nest.map_structure(scale, original(*args, **options))

    tf.GradientTape.gradient = gradient
    try:
        yield
    finally:
        tf.GradientTape.gradient = original


def explain_partial(evidence: Evidence) -> str | None:
    """Recognizes a term of the loss that grows with the number of replicas while others do not.

    The error of the update on N replicas is then `factor(N) - 1` times one fixed vector: 1 and 3
    times on 2 and 4 replicas if each replica adds the complete term.
    """
    errors: dict[int, np.ndarray] = {}
    batch = next((s.batch for s in evidence.records if s.even and s.replicas > 1), 0)
    for split, record in evidence.records.items():
        if split.batch == batch and split.even and split.micro_batches == 1 and split.replicas > 1:
            reference = evidence.references[batch]
            errors[split.replicas] = record.flat_update() - reference.flat_update()
    for few, many in itertools.pairwise(sorted(errors)):
        factor = common_factor(errors[many], errors[few], 1e-5)
        if factor is not None and abs(factor - (many - 1) / (few - 1)) < _CLOSE:
            return causes.PART_SUMMED
    return None


def _explain_other_model(differences: Sequence[Difference]) -> Finding | None:
    """Recognizes that all updates of a second model have the same wrong factor.

    The gradients of its rows are unknown, because its loss is in the trainer's own step. The updates of
    a model that is trained after it differ too, but by no factor.
    """
    first = differences[0]
    same_split = [d for d in differences if (d.split, d.step) == (first.split, first.step)]
    same_split = [d for d in same_split if d.factor is not None]
    replicas = first.split.replicas
    of_uneven = [
        d for d in differences if not d.split.even and d.name in [s.name for s in same_split[:1]]
    ]
    is_twice = any(d.has_factor(d.split.replicas) for d in of_uneven)
    twice = causes.REDUCED_TWICE if is_twice else causes.MEANS_OR_TWICE
    for factor, cause in ((replicas, twice), (1 / replicas, causes.AVERAGED)):
        if same_split and all(d.has_factor(factor) for d in same_split):
            return same_split[0], cause
    return None


def _explain_uneven_rows(rows: np.ndarray, split: Split, pads: bool) -> str | None:
    """Returns the cause from the coefficients of the rows of an uneven batch."""
    sizes = np.repeat(split.row_counts, split.row_counts)
    if split.micro_batches == 1 and _all_close(rows * sizes, rows[0] * sizes[0]):
        how = "summed" if _all_close(rows * sizes, split.batch) else "averaged"
        return causes.OWN_ROWS.format(how=how)
    if (
        pads
        and len(rows) > 1
        and _all_close(rows[:-1], rows[0])
        and rows[-1] > rows[0] * (1 + _CLOSE)
    ):
        return causes.PADDING.format(times=as_fraction(float(rows[-1] / rows[0])))
    return None


def _micro_batch_sizes(split: Split) -> np.ndarray:
    """Returns [batch] numbers of rows in the micro-batch of each row, on one replica."""
    rows = split.rows_per_replica
    cuts = [rows * i // split.micro_batches for i in range(split.micro_batches + 1)]
    return np.repeat(np.diff(cuts), np.diff(cuts)).astype(float)


def _all_close(values: np.ndarray, expected: float) -> bool:
    return bool(np.abs(values - expected).max(initial=0.0) <= _CLOSE * max(abs(expected), 1e-12))
