"""Rules that map differences of metrics and evaluations to a likely cause."""

import dataclasses
import functools

import numpy as np

from ctl.testing.diagnosis import causes, probes
from ctl.testing.diagnosis.evidence import Evidence, Finding
from ctl.testing.diagnosis.row_rules import close, explain_draws, explain_rows
from ctl.testing.recording import record_run
from ctl.testing.report import Difference
from ctl.testing.trial_spec import build_trainer

_EXTRA_BATCHES = 4  # tried to distinguish mistakes of a metric


def explain_evaluation(evidence: Evidence) -> Finding | None:
    """Recognizes an evaluation whose outputs or losses differ before anything is summed."""
    kinds = {difference.kind for difference in evidence.differences}
    if kinds != {"evaluation"}:
        return None
    first = evidence.of_kind("evaluation")[0]
    if explain_draws(evidence, first.split, training=False):
        return first, causes.EVALUATION_NOISE
    cause = explain_rows(evidence, first.split, training=False)
    return (first, cause) if cause else None


def explain_metric(evidence: Evidence) -> Finding | None:
    """Recognizes metrics that are averaged or summed over the replicas, or count padding."""
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
    """Returns the mistakes that give a metric's value; tries more batches while several do.

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
    matches = {causes.METRIC_PADDING} if close(value, with_padding) else set()
    return matches | {causes.METRIC_AVERAGED for mean in means if close(value, mean)}
