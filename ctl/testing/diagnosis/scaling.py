"""Mistakes that show in how often an update counts what it is made of. Pure arithmetic."""

from collections.abc import Mapping
import itertools
from typing import TYPE_CHECKING

import numpy as np

from ctl.testing.diagnosis import causes
from ctl.testing.report import as_fraction, factor_of
from ctl.testing.splits import RATE, Split

if TYPE_CHECKING:
    from ctl.testing.diagnosis.probes import Counts
    from ctl.testing.recording import Record

_CLOSE = 1e-4  # a decomposition solves equations, and loses digits


def cause(counts: Mapping[Split, "Counts"], split: Split) -> str | None:
    """The mistake by which rows, penalty and weights count as they do.

    Args:
        counts: of the first split that differs, and of an uneven one if there is one.
        split: the first.
    """
    first = counts[split]
    if _all_close(first.rows, 1.0):
        return _beside_the_rows(first)
    uneven = next((each for each in counts if not each.even), None)
    told = _of_shares(counts[uneven].rows, uneven) if uneven is not None else None
    if told and split.micro_batches == 1:
        return told
    if _all_close(first.rows, first.rows[0]):
        return _of_factor(float(first.rows[0]), split)
    parts = _micro_batch_rows(split)
    if split.replicas == 1 and _all_close(first.rows * parts, first.rows[0] * parts[0]):
        return causes.MICRO_BATCH
    listed = ", ".join(as_fraction(float(times)) for times in first.rows)
    return causes.DENOMINATOR.format(times=listed)


def clipping(
    records: Mapping[Split, "Record"], references: Mapping[int, "Record"], split: Split
) -> str | None:
    """Whether one replica clips to a norm that several replicas pass.

    The updates of different batches have the same norm only if something makes it so.
    """
    norms = [_norm(reference, step) for reference in references.values() for step in (0, -1)]
    if min(norms) <= 0 or max(norms) / min(norms) > 1 + 1e-6 or len(set(norms)) < 2:
        return None
    found = _norm(records[split], 0) / norms[0]
    if abs(found - 1) < 1e-6 and split.replicas > 1:
        return None
    return causes.CLIPPED.format(norm=norms[0] / RATE, times=as_fraction(found))


def partial(records: Mapping[Split, "Record"], references: Mapping[int, "Record"]) -> str | None:
    """Whether a part of the update, but not all of it, grows with the number of replicas.

    What is added to the right update is then `factor(N) - 1` times the same part: 1 and 3 times it
    on 2 and 4 replicas if each adds it whole.
    """
    extra: dict[int, np.ndarray] = {}
    batch = next((s.batch for s in records if s.even and s.replicas > 1), None)
    for split, record in records.items():
        if split.batch == batch and split.even and split.micro_batches == 1 and split.replicas > 1:
            extra[split.replicas] = _flat(record, 0) - _flat(references[batch], 0)
    for few, many in itertools.pairwise(sorted(extra)):
        factor = factor_of(extra[many], extra[few], 1e-5)
        if factor is None:
            continue
        if abs(factor - (many - 1) / (few - 1)) < _CLOSE:
            return causes.PART_SUMMED
        if abs(factor - (1 - 1 / many) / (1 - 1 / few)) < _CLOSE:
            return causes.PART_AVERAGED
    return None


def _beside_the_rows(counts: "Counts") -> str | None:
    if abs(counts.penalty - 1) > _CLOSE:
        return causes.PENALTY.format(times=as_fraction(counts.penalty))
    whole = counts.decay_of_reference
    if whole and abs(counts.decay) > _CLOSE * abs(whole):
        return causes.DECAY.format(times=as_fraction(1 + counts.decay / whole))
    return None


def _of_shares(rows: np.ndarray, split: Split) -> str | None:
    """The mistake by how the rows of an uneven batch count."""
    holders = np.repeat(np.arange(split.replicas), split.shares)
    sizes = np.asarray(split.shares)[holders]
    if split.micro_batches == 1 and _all_close(rows * sizes, rows[0] * sizes[0]):
        how = "summed" if _all_close(rows * sizes, split.batch) else "averaged"
        return causes.OWN_ROWS.format(how=how)
    if len(rows) > 1 and _all_close(rows[:-1], rows[0]) and rows[-1] > rows[0] * (1 + _CLOSE):
        told = causes.PADDING if _all_close(rows[:1], 1.0) else causes.PADDING_MEAN
        return told.format(times=as_fraction(float(rows[-1] / rows[0])))
    return None


def _of_factor(factor: float, split: Split) -> str | None:
    known = [
        (split.replicas, causes.REDUCED_TWICE),
        (1 / split.replicas, causes.AVERAGED),
        (split.micro_batches, causes.MICRO_BATCH),
        (1 / split.micro_batches, causes.MICRO_BATCH_TWICE),
    ]
    near = (told for value, told in known if value != 1 and abs(factor / value - 1) < _CLOSE)
    return next(near, None)


def _micro_batch_rows(split: Split) -> np.ndarray:
    """[batch] how many rows the micro-batch of a row has, on one replica."""
    cuts = [split.rows * i // split.micro_batches for i in range(split.micro_batches + 1)]
    return np.repeat(np.diff(cuts), np.diff(cuts)).astype(float)


def _flat(record: "Record", step: int) -> np.ndarray:
    values = [v for (kind, _), v in record.steps[step].items() if kind == "update"]
    return np.concatenate([v.ravel() for v in values]) if values else np.zeros(0)


def _norm(record: "Record", step: int) -> float:
    return float(np.linalg.norm(_flat(record, step)))


def _all_close(values: np.ndarray, wanted: float) -> bool:
    return bool(np.abs(values - wanted).max(initial=0.0) <= _CLOSE * max(abs(wanted), 1e-12))
