"""Rules that map differences between splits to a likely cause."""

from collections.abc import Callable, Iterator, Sequence
import functools

from ctl.errors import list_some
from ctl.testing.diagnosis import causes, probes, scaling
from ctl.testing.diagnosis.evidence import Evidence, Finding, SplitDifferences
from ctl.testing.diagnosis.metric_rules import explain_evaluation, explain_metric
from ctl.testing.diagnosis.row_rules import explain_draws, explain_rows
from ctl.testing.report import Difference
from ctl.testing.splits import Split


def explain(evidence: Evidence) -> tuple[list[Difference], str]:
    """Returns the differences, the one that shows the cause first; and the cause.

    Args:
        evidence: the evidence, with at least one difference.
    """
    rules: Sequence[Callable[[Evidence], Finding | None]] = (
        _explain_statistics,
        explain_copies,
        _explain_random,
        _explain_forward,
        _explain_update,
        explain_loss,
        explain_evaluation,
        explain_metric,
        _explain_state,
    )
    for rule in rules:
        finding = rule(evidence)
        if finding is not None:
            first, cause = finding
            return [first, *other_differences(evidence, first)], cause
    order = evidence.of_kind("update", "loss", "metric", "evaluation", "statistic", "state", "copy")
    return [order[0], *other_differences(evidence, order[0])], causes.UNKNOWN


def other_differences(evidence: SplitDifferences, first: Difference) -> Iterator[Difference]:
    """Yields the differences other than the first one, those on the same split first."""
    ordered = evidence.of_kind(*dict.fromkeys(d.kind for d in evidence.differences))
    ordered.sort(key=lambda d: d.split != first.split)
    return (d for d in ordered if d is not first)


def _explain_statistics(evidence: Evidence) -> Finding | None:
    differences = evidence.of_kind("statistic")
    if not differences or explain_draws(evidence, differences[0].split):
        return None
    first = differences[0]
    if all(not d.split.even for d in differences) and any(s.even for s in evidence.records):
        return first, causes.PADDED_STATISTICS
    one = first.split.replicas == 1
    return first, causes.MICRO_BATCH_STATISTICS if one else causes.OWN_STATISTICS


def explain_copies(evidence: SplitDifferences) -> Finding | None:
    """Recognizes variables whose copies on the replicas differ."""
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
        cause = explain_draws(evidence, difference.split)
        return (difference, cause) if cause else None
    return None


def _explain_forward(evidence: Evidence) -> Finding | None:
    """Recognizes rows that differ before anything is summed over them."""
    for difference in evidence.on_several_replicas():
        cause = explain_rows(evidence, difference.split)
        return (difference, cause) if cause else None
    return None


def _explain_update(evidence: Evidence) -> Finding | None:
    differences = evidence.of_kind("update")
    if not differences:
        return None
    first = differences[0]
    cause = scaling.explain_clipping(
        evidence.records, evidence.references, first.split
    ) or _explain_coefficients(evidence, first.split)
    if cause:
        return first, cause
    # Before `explain_partial`: one factor of all updates of a model also grows with the replicas.
    finding = explain_other_model(differences)
    cause = None if finding else scaling.explain_partial(evidence.records, evidence.references)
    return (first, cause) if cause else finding


def explain_other_model(differences: Sequence[Difference]) -> Finding | None:
    """Recognizes that all updates of a second model have the same wrong factor.

    The gradients of its rows are unknown, because its loss is in the trainer's own step. The updates of
    a model that is trained after it differ too, but by no factor.
    """
    first = differences[0]
    same_split = [d for d in differences if (d.split, d.step) == (first.split, first.step)]
    same_split = [d for d in same_split if d.factor is not None]
    replicas = first.split.replicas
    for factor, how in (
        (replicas, f"summed over the replicas {replicas} times, or are those of a local mean"),
        (1 / replicas, "averaged over the replicas, or divided by their number twice"),
    ):
        if same_split and all(d.has_factor(factor) for d in same_split):
            names = list_some([d.name for d in same_split])
            return same_split[0], causes.ALL_UPDATES.format(variables=names, how=how)
    return None


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


def explain_loss(evidence: SplitDifferences) -> Finding | None:
    """Recognizes that a step returns a wrong loss although its updates are right."""
    differences = evidence.of_kind("loss")
    if not differences or evidence.of_kind("update"):
        return None
    first = differences[0]
    share = first.has_factor(1 / first.split.replicas)
    return first, causes.OWN_SHARE if share else causes.LOSS_ONLY


def _explain_state(evidence: Evidence) -> Finding | None:
    differences = evidence.of_kind("state")
    if not differences or evidence.of_kind("update"):
        return None
    first = differences[0]
    added_by_each = first.has_factor(first.split.replicas)
    return first, causes.ADDED_BY_EACH if added_by_each else causes.OWN_UPDATE
