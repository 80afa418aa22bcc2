"""Rules that map differences between splits to a likely cause."""

from collections.abc import Callable, Sequence

import numpy as np

from ctl.testing.diagnosis import causes
from ctl.testing.diagnosis.evidence import Evidence, Finding
from ctl.testing.diagnosis.metric_rules import explain_evaluation, explain_growth, explain_metric
from ctl.testing.diagnosis.row_rules import explain_draws, explain_rows
from ctl.testing.diagnosis.update_rules import explain_update
from ctl.testing.report import Difference, common_factor

_CLOSE = 1e-4  # relative


def explain(evidence: Evidence) -> tuple[list[Difference], str]:
    """Returns the differences, the one that shows the cause first; and the cause.

    Args:
        evidence: the evidence, with at least one difference.
    """
    for rule in _RULES:
        finding = rule(evidence)
        if finding is not None:
            first, cause = finding
            return [first, *evidence.others(first)], cause
    kinds = ("update", "loss", "metric", "evaluation", "statistic", "state", "copy")
    first = evidence.of_kind(*kinds)[0]
    return [first, *evidence.others(first)], causes.UNKNOWN


def _explain_statistics(evidence: Evidence) -> Finding | None:
    differences = evidence.of_kind("statistic")
    if not differences or explain_draws(evidence, differences[0].split):
        return None
    first = differences[0]
    if all(not d.split.even for d in differences) and any(s.even for s in evidence.records):
        return first, causes.UNEVEN_STATISTICS
    one = first.split.replicas == 1
    return first, causes.MICRO_BATCH_STATISTICS if one else causes.OWN_STATISTICS


def _explain_copies(evidence: Evidence) -> Finding | None:
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


def _explain_values_of_rows(evidence: Evidence) -> Finding | None:
    """Recognizes rows that differ before anything is summed over them."""
    for difference in evidence.on_several_replicas()[:1]:
        split = difference.split
        cause = explain_draws(evidence, split) or explain_rows(evidence, split)
        return (difference, cause) if cause else None
    return None


def _explain_loss(evidence: Evidence) -> Finding | None:
    """Recognizes that a step returns a wrong loss although its updates are right."""
    differences = evidence.of_kind("loss")
    if not differences or evidence.of_kind("update"):
        return None
    first = differences[0]
    share = first.has_factor(1 / first.split.replicas)
    return first, causes.OWN_SHARE if share else causes.LOSS_ONLY


def _explain_state(evidence: Evidence) -> Finding | None:
    """Recognizes variables that each replica changes."""
    differences = evidence.of_kind("state")
    if not differences or evidence.of_kind("update"):
        return None
    first = differences[0]
    key, replicas = ("state", first.name), first.split.replicas
    record, reference = evidence.records[first.split], evidence.references[first.split.batch]
    changed, expected = (
        each.steps[0][key] - each.start.get(key, np.zeros([])) for each in (record, reference)
    )
    factor = common_factor(changed, expected, _CLOSE)
    added = factor is not None and abs(factor / replicas - 1) < _CLOSE
    return first, causes.ADDED_BY_EACH if added else causes.OWN_UPDATE


_RULES: Sequence[Callable[[Evidence], Finding | None]] = (
    _explain_statistics,
    _explain_copies,
    _explain_values_of_rows,
    explain_update,
    explain_growth,
    _explain_loss,
    explain_evaluation,
    explain_metric,
    _explain_state,
)
