"""Rules that map differences between splits to a likely cause."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools

import numpy as np

from ctl.testing.diagnosis import causes, probes, scaling
from ctl.testing.recording import Record, record_run
from ctl.testing.report import Difference
from ctl.testing.splits import Split
from ctl.testing.trial_spec import TrialSpec, build_trainer

_EXTRA_BATCHES = 4  # tried to distinguish mistakes of a metric


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known about a trainer that depends on the split.

    Attributes:
        spec: what was run.
        precision: dtype of the computation.
        records: the record of each split.
        references: global batch size -> the record on one replica.
        differences: the differences between them.
    """

    spec: TrialSpec
    precision: str
    records: Mapping[Split, Record]
    references: Mapping[int, Record]
    differences: Sequence[Difference]

    def of_kind(self, *kinds: str) -> list[Difference]:
        """Returns the differences of some kinds, those on the simplest split first."""
        differences = [d for d in self.differences if d.kind in kinds]
        return sorted(differences, key=lambda d: (d.step, d.split.micro_batches, d.split.replicas))

    def on_several_replicas(self) -> list[Difference]:
        """Returns the differences of updates and losses on more than one replica."""
        differences = [*self.of_kind("update"), *self.of_kind("loss")]
        return [d for d in differences if d.split.replicas > 1]

    def rows(self, split: Split) -> tuple[probes.RowValues, probes.RowValues] | None:
        """Returns the first batch's rows on one replica and on a split, or None if unknown."""
        reference = probes.compute_rows(self.spec, split.reference, self.precision)
        values = probes.compute_rows(self.spec, split, self.precision)
        return None if reference is None or values is None else (reference, values)


Finding = tuple[Difference, str]  # the difference to report first, and its cause


def explain(evidence: Evidence) -> tuple[list[Difference], str]:
    """Returns the differences, the one that shows the cause first; and the cause.

    Args:
        evidence: with at least one difference.
    """
    rules: Sequence[Callable[[Evidence], Finding | None]] = (
        _explain_statistics,
        _explain_copies,
        _explain_random,
        _explain_forward,
        _explain_update,
        _explain_loss,
        _explain_metric,
        _explain_state,
    )
    for rule in rules:
        finding = rule(evidence)
        if finding is not None:
            first, cause = finding
            return [first, *_others(evidence, first)], cause
    order = evidence.of_kind("update", "loss", "metric", "evaluation", "statistic", "state", "copy")
    return [order[0], *_others(evidence, order[0])], causes.UNKNOWN


def _others(evidence: Evidence, first: Difference) -> Iterator[Difference]:
    """Yields the other differences, those on the same split first."""
    ordered = evidence.of_kind(*{d.kind for d in evidence.differences})
    ordered.sort(key=lambda d: d.split != first.split)
    return (d for d in ordered if d is not first)


def _explain_statistics(evidence: Evidence) -> Finding | None:
    differences = evidence.of_kind("statistic")
    if not differences or _explain_draws(evidence, differences[0].split):
        return None
    first = differences[0]
    if all(not d.split.even for d in differences) and any(s.even for s in evidence.records):
        return first, causes.PADDED_STATISTICS
    one = first.split.replicas == 1
    return first, causes.MICRO_BATCH_STATISTICS if one else causes.OWN_STATISTICS


def _explain_copies(evidence: Evidence) -> Finding | None:
    differences = evidence.of_kind("copy")
    if not differences:
        return None
    first = differences[0]
    mismatches = [m for m in evidence.records[first.split].mismatches if m.name[1] == first.name]
    if any(mismatch.name[0] == "update" for mismatch in mismatches):
        return first, causes.NOT_REDUCED
    changed = mismatches[0].changed
    if len(changed) < mismatches[0].replicas:
        return first, causes.SOME_REPLICAS.format(which=" and ".join(map(str, changed)))
    return first, causes.OWN_UPDATE


def _explain_random(evidence: Evidence) -> Finding | None:
    for difference in evidence.on_several_replicas():
        cause = _explain_draws(evidence, difference.split)
        return (difference, cause) if cause else None
    return None


def _explain_draws(evidence: Evidence, split: Split) -> str | None:
    """Returns how the random numbers of a row depend on the split, or None if they do not.

    If all rows are equal, only random numbers can make their outputs different.
    """
    if split.replicas < 2:
        return None
    examples = evidence.spec.examples
    equal = {name: values[:1].repeat(split.batch, 0) for name, values in examples.items()}
    spec = dataclasses.replace(evidence.spec, examples=equal)
    rows = dataclasses.replace(evidence, spec=spec).rows(split)
    if rows is None:
        return None
    reference, values = rows
    if all(_is_constant(v) for v in reference.outputs):
        return None
    if _all_close(reference.outputs, values.outputs):
        return None
    first, *others = values.by_replica
    same_numbers = all(_all_close(first, other) for other in others)
    return causes.SAME_NUMBERS if same_numbers else causes.OTHER_NUMBERS


def _explain_forward(evidence: Evidence) -> Finding | None:
    """Recognizes rows that differ before anything is summed over them."""
    for difference in evidence.on_several_replicas():
        rows = evidence.rows(difference.split)
        if rows is None:
            return None
        reference, values = rows
        if not _all_close(reference.outputs, values.outputs):
            return difference, causes.FORWARD
        if not _close(reference.losses, values.losses):
            return difference, causes.PER_EXAMPLE.format(hook="per_example_loss")
        if not _close(reference.weights, values.weights):
            return difference, causes.PER_EXAMPLE.format(hook="sample_weight")
        return None
    return None


def _explain_update(evidence: Evidence) -> Finding | None:
    differences = evidence.of_kind("update")
    if not differences:
        return None
    first = differences[0]
    cause = (
        scaling.explain_clipping(evidence.records, evidence.references, first.split)
        or _explain_coefficients(evidence, first.split)
        or scaling.explain_partial(evidence.records, evidence.references)
    )
    return (first, cause) if cause else None


def _explain_coefficients(evidence: Evidence, split: Split) -> str | None:
    """Explains the coefficients on the first split and on the first uneven one."""
    uneven = [d.split for d in evidence.of_kind("update") if not d.split.even]
    uneven = [s for s in uneven if s.replicas == split.replicas] or uneven
    coefficients = {}
    for each in dict.fromkeys([split, *uneven[:1]]):
        solution = probes.attempt(functools.partial(_decompose, evidence, each))
        if solution is not None:
            coefficients[each] = solution
    return scaling.explain_coefficients(coefficients, split) if split in coefficients else None


def _decompose(evidence: Evidence, split: Split) -> probes.Coefficients | None:
    decomposition = probes.Decomposition(evidence.spec, split.batch, evidence.precision)
    return decomposition.coefficients(evidence.records[split], evidence.references[split.batch])


def _explain_loss(evidence: Evidence) -> Finding | None:
    differences = evidence.of_kind("loss")
    if not differences or evidence.of_kind("update"):
        return None
    first = differences[0]
    share = first.has_factor(1 / first.split.replicas)
    return first, causes.OWN_SHARE if share else causes.LOSS_ONLY


def _explain_metric(evidence: Evidence) -> Finding | None:
    differences = [*evidence.of_kind("metric"), *evidence.of_kind("evaluation")]
    if not differences or evidence.of_kind("update", "statistic"):
        return None
    for difference in differences:
        if difference.split.even and difference.has_factor(1 / difference.split.replicas):
            return difference, causes.METRIC_NOT_SUMMED
        if difference.split.even and difference.has_factor(difference.split.replicas):
            return difference, causes.METRIC_SUMMED
    plain = [d for d in differences if d.kind == "metric" and d.split.micro_batches == 1]
    if not plain:
        return differences[0], causes.METRIC
    matches = probes.attempt(functools.partial(_match_metric_mistakes, evidence, plain[0])) or set()
    return plain[0], matches.pop() if len(matches) == 1 else causes.METRIC


def _match_metric_mistakes(evidence: Evidence, difference: Difference) -> set[str]:
    """Returns the mistakes that give a metric's value, on more batches while there are several.

    With few rows, two mistakes often give the same value.
    """
    matches = _simulate_metric_mistakes(evidence, difference)
    for shift in range(1, _EXTRA_BATCHES + 1):
        if len(matches) < 2:
            break
        examples = {name: np.roll(v, -shift, axis=0) for name, v in evidence.spec.examples.items()}
        spec = dataclasses.replace(evidence.spec, examples=examples)
        trainer = build_trainer(spec, difference.split, precision=evidence.precision)
        record = record_run(trainer, difference.split, steps=1)
        other = dataclasses.replace(evidence, spec=spec, records={difference.split: record})
        matches &= _simulate_metric_mistakes(other, difference)
    return matches


def _simulate_metric_mistakes(evidence: Evidence, difference: Difference) -> set[str]:
    """Makes each known mistake on one replica; returns those that give the metric's value."""
    split, name = difference.split, difference.name
    value = evidence.records[split].steps[0]["metric", name]
    rows = split.rows_per_replica
    padded = [min(i, split.batch - 1) for i in range(rows * split.replicas)]
    shares = [padded[r * rows :][:count] for r, count in enumerate(split.row_counts) if count]
    with_padding, *by_replica = (
        np.asarray(values[name], np.float64)
        for values in probes.metrics_of_rows(
            evidence.spec, split.batch, evidence.precision, [padded, *shares]
        )
    )
    # The mean may exclude a replica without rows, or include it as zero.
    means = [np.sum(by_replica, axis=0) / count for count in (split.replicas, len(by_replica))]
    matches = {causes.METRIC_PADDING} if _close(value, with_padding) else set()
    return matches | {causes.METRIC_AVERAGED for mean in means if _close(value, mean)}


def _explain_state(evidence: Evidence) -> Finding | None:
    differences = evidence.of_kind("state")
    if not differences or evidence.of_kind("update"):
        return None
    first = differences[0]
    added_by_each = first.has_factor(first.split.replicas)
    return first, causes.ADDED_BY_EACH if added_by_each else causes.OWN_UPDATE


def _is_constant(values: np.ndarray) -> bool:
    return _close(values, values[:1].repeat(len(values), 0))


def _all_close(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(_close(a, b) for a, b in zip(values, others, strict=True))


def _close(values: np.ndarray, others: np.ndarray) -> bool:
    if values.shape != others.shape:
        return False
    # The minimum of 0.1 is for values that should be zero: they are rounding errors only.
    return bool(np.allclose(values, others, rtol=0, atol=1e-5 * np.abs(values).max(initial=0.1)))
