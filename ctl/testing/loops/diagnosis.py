"""Finds the likely cause of a difference between the splits of a loop."""

from collections.abc import Callable, Sequence
import dataclasses
import functools

import numpy as np
import tensorflow as tf

from ctl.testing.diagnosis import causes, numerics, probes, rules, scaling
from ctl.testing.diagnosis.evidence import Finding, SplitDifferences
from ctl.testing.diagnosis.row_rules import close
from ctl.testing.loops import causes as loop_causes
from ctl.testing.loops.protocol import LoopSplit
from ctl.testing.loops.rows import RowUpdates
from ctl.testing.loops.runner import LoopRun, LoopSpec, State
from ctl.testing.report import Difference, as_fraction, common_factor
from ctl.testing.splits import Split

_CLOSE = 1e-4  # relative; coefficients solve a least-squares problem and lose digits
_SCALES = ("current_loss_scale", "dynamic_scale")  # in tf_keras and Keras 3
_METRIC_BATCHES = 4
_SCALE = 8.0  # a power of two, so that scaling is exact


@dataclasses.dataclass(frozen=True)
class LoopEvidence(SplitDifferences):
    """The differences between the splits of a loop, and the loop to measure it further.

    Attributes:
        spec: what was run.
        run: the loop on one replica.
        state: the state before the first step.
    """

    spec: LoopSpec
    run: LoopRun
    state: State


def explain(evidence: LoopEvidence) -> tuple[list[Difference], str]:
    """Returns the differences, the one that shows the cause first; and the cause.

    Args:
        evidence: the evidence, with at least one difference.
    """
    explain_rules: Sequence[Callable[[LoopEvidence], Finding | None]] = (
        _explain_statistics,
        rules.explain_copies,
        _explain_update,
        _explain_growth,
        rules.explain_loss,
        _explain_metric,
        _explain_state,
    )
    for rule in explain_rules:
        finding = rule(evidence)
        if finding is not None:
            first, cause = finding
            others = rules.other_differences(evidence, first)
            return [first, *others], loop_causes.for_loops(cause)
    order = evidence.of_kind("update", "loss", "metric", "statistic", "state", "copy")
    return [order[0], *rules.other_differences(evidence, order[0])], loop_causes.UNKNOWN


def _explain_statistics(evidence: LoopEvidence) -> Finding | None:
    differences = evidence.of_kind("statistic")
    if not differences:
        return None
    first = differences[0]
    if all(not d.split.even for d in differences) and any(s.even for s in evidence.records):
        return first, loop_causes.UNEVEN_STATISTICS
    return first, loop_causes.OWN_STATISTICS


def _explain_update(evidence: LoopEvidence) -> Finding | None:
    differences = evidence.of_kind("update")
    if not differences:
        return None
    first = differences[0]
    cause = scaling.explain_clipping(evidence.records, evidence.references, first.split)
    cause = cause or _explain_coefficients(evidence, first.split)
    if cause and cause != loop_causes.WEIGHTS:
        return first, cause
    finding = rules.explain_other_model(differences)
    if finding is not None:
        difference, text = finding
        return difference, text.partition(" `minimize`")[0]
    partial = scaling.explain_partial(evidence.records, evidence.references)
    cause = cause or partial
    return (first, cause) if cause else None


def _explain_coefficients(evidence: LoopEvidence, split: Split) -> str | None:
    """Explains how much the rows count on the first split, and on the first uneven one."""
    uneven = [d.split for d in evidence.of_kind("update") if not d.split.even]
    uneven = [s for s in uneven if s.replicas == split.replicas] or uneven
    chosen = list(dict.fromkeys([split, *uneven[:1]]))

    def measure() -> dict[Split, probes.Coefficients]:
        count = max(each.batch for each in chosen)
        updates = RowUpdates(evidence.spec, evidence.state, count)
        values = {
            each: updates.coefficients(evidence.records[each], evidence.references[each.batch])
            for each in chosen
        }
        return {each: value for each, value in values.items() if value is not None}

    coefficients = probes.attempt(measure)
    if not coefficients or split not in coefficients:
        return None
    rows = coefficients[split].rows
    if np.abs(rows - 1).max() < _CLOSE and coefficients[split].extra_decay > _CLOSE:
        return loop_causes.WEIGHTS
    times = _local_factors(rows, split)
    if times:
        return loop_causes.LOCAL_VALUE.format(times=times)
    return scaling.explain_coefficients(coefficients, split)


def _local_factors(rows: np.ndarray, split: Split) -> str:
    """Returns the factor of each replica's rows if they differ on an even split, or ""."""
    if not split.even:
        return ""
    by_replica = rows.reshape(split.replicas, -1)
    same = np.abs(by_replica - by_replica[:, :1]).max() < _CLOSE * np.abs(rows).max()
    if not same or np.ptp(by_replica[:, 0]) < _CLOSE * np.abs(rows).max():
        return ""
    return " and ".join(as_fraction(float(factor)) for factor in by_replica[:, 0])


def _explain_growth(evidence: LoopEvidence) -> Finding | None:
    """Recognizes metrics, such as the loss of Keras' `fit`, that grow with the replicas in each step."""
    if evidence.of_kind("update", "statistic"):
        return None
    differences = evidence.of_kind("metric", "loss")
    growing = next((d for d in differences if _grows(evidence, d)), None)
    return None if growing is None else (growing, loop_causes.METRIC_GROWS)


def _explain_metric(evidence: LoopEvidence) -> Finding | None:
    differences = evidence.of_kind("metric")
    if not differences or evidence.of_kind("update", "statistic"):
        return None
    for difference in differences:
        if difference.split.even and difference.has_factor(1 / difference.split.replicas):
            return difference, causes.METRIC_NOT_SUMMED
        if difference.split.even and difference.has_factor(difference.split.replicas):
            return difference, causes.METRIC_SUMMED
    first = differences[0]
    matches = probes.attempt(functools.partial(_match_metric_mistakes, evidence, first)) or set()
    return first, matches.pop() if len(matches) == 1 else loop_causes.METRIC


def _grows(evidence: LoopEvidence, difference: Difference) -> bool:
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


def _match_metric_mistakes(evidence: LoopEvidence, difference: Difference) -> set[str]:
    """Makes each known mistake on one replica; returns those that give the metric's value.

    With few rows, two mistakes may give the same value, so that several batches are tried.
    """
    split = difference.split
    # Keras numbers the metrics of each model differently.
    names = [key for key in evidence.references[split.batch].steps[0] if key[0] == "metric"]
    position = names.index(("metric", difference.name))
    one, several = (LoopRun(evidence.spec, LoopSplit(split.batch, n)) for n in (1, split.replicas))
    rows, count = split.rows_per_replica, len(tf.nest.flatten(evidence.spec.examples)[0])

    def measure(run: LoopRun, selected: Sequence[int]) -> np.ndarray:
        run.set_state(evidence.state)
        results = [v for (kind, _), v in run.train(selected).items() if kind == "metric"]
        return np.asarray(results[position], np.float64)

    matches = {causes.METRIC_AVERAGED, loop_causes.METRIC_PADDING}
    for shift in range(_METRIC_BATCHES):
        indexes = [(shift + i) % count for i in range(split.batch)]
        value = measure(several, indexes)
        padding = [indexes[-1]] * (rows * split.replicas - split.batch)
        shares = [indexes[r * rows :][:n] for r, n in enumerate(split.row_counts) if n]
        by_replica = [measure(one, share) for share in shares]
        means = [np.sum(by_replica, axis=0) / n for n in (split.replicas, len(by_replica))]
        if not any(close(value, mean) for mean in means):
            matches.discard(causes.METRIC_AVERAGED)
        if not evidence.spec.mask or not close(value, measure(one, [*indexes, *padding])):
            matches.discard(loop_causes.METRIC_PADDING)
    return matches


def _explain_state(evidence: LoopEvidence) -> Finding | None:
    """Recognizes variables that each replica changes."""
    differences = evidence.of_kind("state")
    if not differences or evidence.of_kind("update"):
        return None
    first = differences[0]
    position = list(evidence.run.contents.name_variables()).index(("state", first.name))
    key, old = ("state", first.name), evidence.state[position]
    record, reference = evidence.records[first.split], evidence.references[first.split.batch]
    factor = common_factor(record.steps[0][key] - old, reference.steps[0][key] - old, _CLOSE)
    added = factor is not None and abs(factor / first.split.replicas - 1) < _CLOSE
    return first, causes.ADDED_BY_EACH if added else causes.OWN_UPDATE


def check_loss_scale(evidence: LoopEvidence, tolerance: float) -> tuple[list[Difference], str]:
    """Checks that the update does not depend on the loss scale, which no split reveals.

    Args:
        evidence: the evidence of the loop.
        tolerance: maximum error of an element, relative to the largest element.
    """
    run, state = evidence.run, list(evidence.state)
    names = list(run.contents.name_variables())
    scales = [i for i, (_, name) in enumerate(names) if any(scale in name for scale in _SCALES)]
    if not scales:
        return [], ""
    scaled = [v * _SCALE if i in scales else v for i, v in enumerate(state)]
    records = [run.record(values) for values in (state, scaled)]
    plain, other = (
        np.concatenate([v.ravel() for (kind, _), v in r.steps[0].items() if kind == "update"])
        for r in records
    )
    error = float(np.abs(plain - other).max(initial=0.0))
    if not error > tolerance * max(float(np.abs(plain).max(initial=0.0)), 1e-6):
        return [], ""
    name = f"update under a loss scale that is {_SCALE:g} times larger"
    factor = float(plain @ other / (plain @ plain)) if plain @ plain else None
    proportional = factor is not None and abs(factor / _SCALE - 1) < 0.05
    split = LoopSplit(run.split.batch)
    difference = Difference("probe", name, split, 0, _SCALE if proportional else None, error)
    return [difference], loop_causes.LOSS_SCALE


def check_normalization(evidence: LoopEvidence) -> tuple[list[Difference], str]:
    """Checks the variances of normalization layers, which no split of small numbers reveals."""
    difference = numerics.check_normalization(evidence.run.contents.layers, LoopSplit(2))
    return ([difference], loop_causes.SQUARES) if difference else ([], "")
