"""Rules that map differences of metrics and evaluations to a likely cause."""

from collections.abc import Sequence

import numpy as np

from ctl.testing.diagnosis import causes
from ctl.testing.diagnosis.evidence import Evidence, Finding, attempt
from ctl.testing.diagnosis.row_rules import close, explain_draws, explain_rows
from ctl.testing.report import Difference

_BATCHES = 4  # tried to distinguish mistakes of a metric


def explain_evaluation(evidence: Evidence) -> Finding | None:
    """Recognizes an evaluation whose outputs or losses differ before anything is summed."""
    if {difference.kind for difference in evidence.differences} != {"evaluation"}:
        return None
    first = evidence.of_kind("evaluation")[0]
    if explain_draws(evidence, first.split, training=False):
        return first, causes.EVALUATION_NOISE
    cause = explain_rows(evidence, first.split, training=False)
    return (first, cause) if cause else None


def explain_growth(evidence: Evidence) -> Finding | None:
    """Recognizes metrics, such as the loss of Keras' `fit`, that grow with the replicas in each step."""
    if evidence.of_kind("update", "statistic"):
        return None
    differences = evidence.of_kind("metric", "loss")
    growing = next((d for d in differences if _grows(evidence, d)), None)
    return None if growing is None else (growing, causes.METRIC_GROWS)


def _grows(evidence: Evidence, difference: Difference) -> bool:
    """Returns whether each step multiplies a metric by the number of replicas before it adds to it."""
    record = evidence.records[difference.split]
    reference, replicas = evidence.references[difference.split.batch], difference.split.replicas
    for key in (name for name in reference.names[-1] if name[0] == "metric"):
        values, expected = (
            np.array([np.sum(step[key]) for step in each.steps]) for each in (record, reference)
        )
        added, correct = values[1:] - replicas * values[:-1], np.diff(expected)
        if np.abs(correct).any() and np.allclose(added, correct, rtol=1e-5, atol=1e-9):
            return True
    return False


def explain_metric(evidence: Evidence) -> Finding | None:
    """Recognizes metrics that are averaged or summed over the replicas, or count padding."""
    differences = evidence.of_kind("metric", "evaluation")
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
    matches = attempt(lambda: _match_mistakes(evidence, plain[0])) or set()
    return plain[0], matches.pop() if len(matches) == 1 else causes.METRIC


def _match_mistakes(evidence: Evidence, difference: Difference) -> set[str]:
    """Makes each known mistake on one replica; returns those that give the metric's value.

    With few rows, two mistakes may give the same value, so that several batches are tried.
    """
    subject, split = evidence.subject, difference.split
    reference = evidence.references[split.batch]
    # Keras numbers the metrics of each model differently.
    names = [n for n in reference.steps[0] if n[0] == "metric" and n not in reference.names[-1]]
    position = names.index(("metric", difference.name))

    def measure(indexes: Sequence[int], replicas: int = 1) -> np.ndarray:
        return subject.metrics(indexes, replicas)[position]

    matches = {causes.METRIC_AVERAGED, causes.METRIC_PADDING}
    for shift in range(_BATCHES):
        indexes = [(shift + i) % subject.count for i in range(split.batch)]
        value = measure(indexes, split.replicas)
        padding = [indexes[-1]] * (split.rows_per_replica * split.replicas - split.batch)
        by_replica = [measure(share) for share in split.shares(indexes) if share]
        # The mean may exclude a replica without rows, or include it as zero.
        means = [np.sum(by_replica, axis=0) / n for n in (split.replicas, len(by_replica))]
        if not any(close(value, mean) for mean in means):
            matches.discard(causes.METRIC_AVERAGED)
        if not subject.pads_rows or not close(value, measure([*indexes, *padding])):
            matches.discard(causes.METRIC_PADDING)
        if len(matches) < 2:
            break
    return matches
