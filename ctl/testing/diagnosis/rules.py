"""Differences between splits -> which to name first, and the mistake that makes such ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools

import numpy as np

from ctl.testing.diagnosis import causes, probes, scaling
from ctl.testing.recording import Plan, Record, build, record
from ctl.testing.report import Difference
from ctl.testing.splits import Split

_OTHER_BATCHES = 4  # to tell mistakes of a metric apart by


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was seen of a trainer that is not right.

    Attributes:
        plan: what was run.
        precision: what in.
        records: of the splits.
        references: of one replica, by the rows of the global batch.
        differences: what differs.
    """

    plan: Plan
    precision: str
    records: Mapping[Split, Record]
    references: Mapping[int, Record]
    differences: Sequence[Difference]

    def of_kind(self, *kinds: str) -> list[Difference]:
        """The differences of some kinds, the simplest split first."""
        found = [d for d in self.differences if d.kind in kinds]
        return sorted(found, key=lambda d: (d.step, d.split.micro_batches, d.split.replicas))

    def on_several_replicas(self) -> list[Difference]:
        """The differences of losses and updates that the number of replicas makes."""
        found = [*self.of_kind("update"), *self.of_kind("loss")]
        return [d for d in found if d.split.replicas > 1]

    def on(self, split: Split, *kinds: str) -> list[Difference]:
        """The differences of a split."""
        return [d for d in self.of_kind(*kinds) if d.split == split]


Finding = tuple[Difference, str]  # what to name first, and the cause


def explain(evidence: Evidence) -> tuple[list[Difference], str]:
    """The differences, the one that gives the cause away first; and the cause.

    Args:
        evidence: with at least one difference.
    """
    rules: Sequence[Callable[[Evidence], Finding | None]] = (
        _statistics,
        _copies,
        _random,
        _forward,
        _update,
        _loss,
        _metric,
        _state,
    )
    for rule in rules:
        found = rule(evidence)
        if found is not None:
            first, cause = found
            return [first, *_others(evidence, first)], cause
    order = evidence.of_kind("update", "loss", "metric", "evaluation", "statistic", "state", "copy")
    return [order[0], *_others(evidence, order[0])], causes.UNKNOWN


def first_rows(plan: Plan, split: Split, precision: str) -> probes.Rows | None:
    """What the rows of the first batch come to, or None where the hooks do not tell."""
    found: probes.Rows | None = probes.attempt(
        lambda: probes.rows(plan, split, precision, training=True)
    )
    return found


def _others(evidence: Evidence, first: Difference) -> Iterator[Difference]:
    near = evidence.on(first.split, *{d.kind for d in evidence.differences})
    far = [d for d in evidence.differences if d.split != first.split]
    return (d for d in (*near, *far) if d is not first)


def _statistics(evidence: Evidence) -> Finding | None:
    found = evidence.of_kind("statistic")
    if not found or _draws_by_replica(evidence, found[0].split):
        return None
    first = found[0]
    if all(not d.split.even for d in found) and any(s.even for s in evidence.records):
        return first, causes.PADDED_STATISTICS
    one = first.split.replicas == 1
    return first, causes.MICRO_BATCH_STATISTICS if one else causes.OWN_STATISTICS


def _copies(evidence: Evidence) -> Finding | None:
    found = evidence.of_kind("copy")
    if not found:
        return None
    first = found[0]
    copies = [c for c in evidence.records[first.split].copies if c.name[1] == first.name]
    if any(kind == "update" for kind, _ in (copy.name for copy in copies)):
        return first, causes.NOT_REDUCED
    moved = copies[0].moved
    if len(moved) < copies[0].of:
        return first, causes.SOME_REPLICAS.format(which=" and ".join(map(str, moved)))
    return first, causes.OWN_UPDATE


def _random(evidence: Evidence) -> Finding | None:
    for difference in evidence.on_several_replicas():
        cause = _draws_by_replica(evidence, difference.split)
        return None if cause is None else (difference, cause)
    return None


def _draws_by_replica(evidence: Evidence, split: Split) -> str | None:
    """How the random numbers of a row depend on the split, or None if they do not.

    Of rows that are all the same, only random numbers can make different outputs.
    """
    if split.replicas < 2:
        return None
    plan = evidence.plan
    same = {name: values[:1].repeat(split.batch, 0) for name, values in plan.examples.items()}
    alike = dataclasses.replace(evidence, plan=dataclasses.replace(plan, examples=same))
    one, several = _rows_of(alike, split)
    if one is None or several is None or all(_is_constant(v) for v in one.outputs):
        return None
    if _all_close(one.outputs, several.outputs):
        return None
    first, *others = several.by_replica
    same_numbers = all(_all_close(first, other) for other in others)
    return causes.SAME_NUMBERS if same_numbers else causes.OTHER_NUMBERS


def _forward(evidence: Evidence) -> Finding | None:
    """A difference that is in the rows already, before anything is summed."""
    for difference in evidence.on_several_replicas():
        one, several = _rows_of(evidence, difference.split)
        if one is None or several is None:
            return None
        if not _all_close(one.outputs, several.outputs):
            return difference, causes.FORWARD
        if not _close(one.losses, several.losses):
            return difference, causes.PER_EXAMPLE.format(hook="per_example_loss")
        if not _close(one.weights, several.weights):
            return difference, causes.PER_EXAMPLE.format(hook="sample_weight")
        return None
    return None


def _update(evidence: Evidence) -> Finding | None:
    found = evidence.of_kind("update")
    if not found:
        return None
    first = found[0]
    cause = (
        scaling.clipping(evidence.records, evidence.references, first.split)
        or _made_of(evidence, first.split)
        or scaling.partial(evidence.records, evidence.references)
    )
    return (first, cause) if cause else None


def _made_of(evidence: Evidence, split: Split) -> str | None:
    """The cause by how often each row counts, on the first split and on the first uneven one."""
    uneven = [d.split for d in evidence.of_kind("update") if not d.split.even]
    uneven = [s for s in uneven if s.replicas == split.replicas] or uneven
    counts = {}
    for each in dict.fromkeys([split, *uneven[:1]]):
        found = probes.attempt(functools.partial(_counts, evidence, each))
        if found is not None:
            counts[each] = found
    return scaling.cause(counts, split) if split in counts else None


def _counts(evidence: Evidence, split: Split) -> probes.Counts | None:
    parts = probes.Decomposition(evidence.plan, split.batch, evidence.precision)
    return parts.counts(evidence.records[split], evidence.references[split.batch])


def _loss(evidence: Evidence) -> Finding | None:
    found = evidence.of_kind("loss")
    if not found or evidence.of_kind("update"):
        return None
    first = found[0]
    share = first.is_times(1 / first.split.replicas)
    return first, causes.OWN_SHARE if share else causes.LOSS_ONLY


def _metric(evidence: Evidence) -> Finding | None:
    found = [*evidence.of_kind("metric"), *evidence.of_kind("evaluation")]
    if not found or evidence.of_kind("update", "statistic"):
        return None
    for difference in found:
        if difference.split.even and difference.is_times(1 / difference.split.replicas):
            return difference, causes.METRIC_NOT_SUMMED
        if difference.split.even and difference.is_times(difference.split.replicas):
            return difference, causes.METRIC_SUMMED
    plain = [d for d in found if d.kind == "metric" and d.split.micro_batches == 1]
    if not plain:
        return found[0], causes.METRIC
    told = probes.attempt(functools.partial(_told_apart, evidence, plain[0])) or set()
    return plain[0], told.pop() if len(told) == 1 else causes.METRIC


def _told_apart(evidence: Evidence, difference: Difference) -> set[str]:
    """The mistakes that give a metric's value on this batch, and on others if these are several.

    Of few rows two mistakes often give the same value.
    """
    possible = _made_on_purpose(evidence, difference)
    for shift in range(1, _OTHER_BATCHES + 1):
        if len(possible) < 2:
            break
        examples = {name: np.roll(v, -shift, axis=0) for name, v in evidence.plan.examples.items()}
        plan = dataclasses.replace(evidence.plan, examples=examples, steps=1)
        trainer = build(plan, difference.split, precision=evidence.precision)
        again = record(trainer, plan, difference.split, evaluate=False)
        other = dataclasses.replace(evidence, plan=plan, records={difference.split: again})
        possible &= _made_on_purpose(other, difference)
    return possible


def _made_on_purpose(evidence: Evidence, difference: Difference) -> set[str]:
    """The mistakes that give the value of a metric when they are made on one replica."""
    split, name = difference.split, difference.name
    got = evidence.records[split].steps[0]["metric", name]
    padded = [min(i, split.batch - 1) for i in range(split.rows * split.replicas)]
    begins = range(0, split.rows * split.replicas, split.rows)
    shares = [padded[b : b + n] for b, n in zip(begins, split.shares, strict=True) if n]
    of_padded, *of_shares = (
        np.asarray(values[name], np.float64)
        for values in probes.metrics_if(
            evidence.plan, split.batch, evidence.precision, [padded, *shares], training=True
        )
    )
    # The value of a replica without rows may be left out of the mean, or count as zero.
    means = [np.sum(of_shares, axis=0) / count for count in (split.replicas, len(of_shares))]
    found = {causes.METRIC_PADDING} if _close(got, of_padded) else set()
    return found | {causes.METRIC_AVERAGED for mean in means if _close(got, mean)}


def _state(evidence: Evidence) -> Finding | None:
    found = evidence.of_kind("state")
    if not found or evidence.of_kind("update"):
        return None
    first = found[0]
    by_each = first.is_times(first.split.replicas)
    return first, causes.ADDED_BY_EACH if by_each else causes.OWN_UPDATE


def _rows_of(evidence: Evidence, split: Split) -> tuple[probes.Rows | None, probes.Rows | None]:
    plan, precision = evidence.plan, evidence.precision
    return first_rows(plan, split.reference, precision), first_rows(plan, split, precision)


def _is_constant(values: np.ndarray) -> bool:
    return _close(values, values[:1].repeat(len(values), 0))


def _all_close(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    return all(_close(a, b) for a, b in zip(one, other, strict=True))


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape:
        return False
    # Numbers that should be zero are rounding alone, and have no digits to compare.
    return bool(np.allclose(one, other, rtol=0, atol=1e-5 * np.abs(one).max(initial=0.1)))
