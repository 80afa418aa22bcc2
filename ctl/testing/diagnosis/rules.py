"""Rules that map differences between splits to a likely cause."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ctl.testing.diagnosis import causes
from ctl.testing.diagnosis.evidence import Evidence, Finding
from ctl.testing.diagnosis.update_rules import explain_update
from ctl.testing.equivalence_report import Difference, common_factor
from ctl.testing.splits import Split
from ctl.testing.subjects import noise
from ctl.testing.subjects.base import RowValues, Subject, attempt

Differences = Sequence[Difference]
Rule = Callable[[Evidence, Differences], Finding | None]
_BATCHES = 4  # tried to distinguish mistakes of a metric
_CLOSE = 1e-4  # relative
_ROUNDING = 0.1  # relative; larger than the rounding errors of a loop that computes in 16 bits


def explain(evidence: Evidence) -> tuple[list[Difference], str]:
    """Returns the differences, the one that shows the cause first; and the cause.

    Args:
        evidence: the evidence, with at least one difference.
    """
    kinds = ("update", "loss", "metric", "evaluation", "statistic", "state", "copy")
    findings = (
        rule(evidence, differences)
        for explained, absent, rule in _RULES
        if (differences := evidence.of_kind(*explained)) and not evidence.of_kind(*absent)
    )
    first, cause = next(filter(None, findings), (evidence.of_kind(*kinds)[0], causes.UNKNOWN))
    # Those on the same split follow.
    others = sorted(evidence.of_kind(*kinds, "probe"), key=lambda d: d.split != first.split)
    return [first, *(d for d in others if d is not first)], cause


def _explain_shared(evidence: Evidence, differences: Differences) -> Finding | None:
    """Recognizes that one replica reads what another one has left in a Python object."""
    first = next((d for d in differences if d.split.replicas > 1), None)
    if first is None:
        return None
    place = attempt(lambda: evidence.subject.start(first.split).find_shared())
    return (first, causes.SHARED.format(place=place)) if place else None


def _explain_statistics(evidence: Evidence, differences: Differences) -> Finding | None:
    first = differences[0]
    if _draws_differ(evidence, first.split):
        return None
    if all(not d.split.even for d in differences) and any(s.even for s in evidence.records):
        return first, causes.UNEVEN_STATISTICS
    part = "replica" if first.split.replicas > 1 else "micro-batch"
    return first, causes.OWN_STATISTICS.format(part=part)


def _explain_copies(evidence: Evidence, differences: Differences) -> Finding | None:
    """Recognizes variables whose copies on the replicas differ."""
    first = differences[0]
    mismatches = [m for m in evidence.records[first.split].mismatches if m.name[1] == first.name]
    if any(mismatch.name[0] == "update" for mismatch in mismatches):
        return first, causes.NOT_REDUCED
    changed = mismatches[0].changed
    if len(changed) < mismatches[0].replicas:
        return first, causes.SOME_REPLICAS.format(which=" and ".join(map(str, changed)))
    return first, causes.OWN_UPDATE


def _explain_rows(evidence: Evidence, differences: Differences) -> Finding | None:
    """Recognizes rows that differ before anything is summed over them, also in an evaluation."""
    first = next((d for d in differences if d.split.replicas > 1), None)
    if first is None:
        return None
    training = first.kind != "evaluation"
    if _draws_differ(evidence, first.split, training=training):
        return first, causes.RANDOM if training else causes.EVALUATION_NOISE
    if (rows := _rows(evidence.subject, first.split, training)) is None:
        return None
    reference, values = rows
    hooks = {
        "forward": _all_close(reference.outputs, values.outputs),
        "per_example_loss": _close(reference.losses, values.losses),
        "sample_weight": _close(reference.weights, values.weights),
    }
    hook = next((name for name, is_close in hooks.items() if not is_close), None)
    return (first, causes.PER_EXAMPLE.format(hook=hook)) if hook else None


def _draws_differ(evidence: Evidence, split: Split, *, training: bool = True) -> bool:
    """Returns whether the random numbers of a row depend on the split.

    If all rows are equal, only random numbers can make their outputs different.
    """
    rows = _rows(evidence.subject.select([0] * evidence.subject.count), split, training)
    if rows is None or split.replicas < 2:
        return False
    reference, values = rows
    drawn = [*reference.outputs, reference.losses]
    is_random = not all(_close(v, v[:1].repeat(len(v), 0)) for v in drawn)
    return is_random and not _all_close(drawn, [*values.outputs, values.losses])


def _rows(subject: Subject, split: Split, training: bool) -> tuple[RowValues, RowValues] | None:
    """Returns the first batch's rows on one replica and on a split, or None if unknown."""
    reference = subject.rows(split.reference, training=training)
    values = subject.rows(split, training=training) if reference else None
    return (reference, values) if reference and values else None


def _all_close(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(_close(a, b) for a, b in zip(values, others, strict=True))


def _close(values: np.ndarray, others: np.ndarray) -> bool:
    """Returns whether two arrays are equal up to rounding errors of float32."""
    if values.shape != others.shape:
        return False
    # The minimum of 0.1 is for values that should be zero: they are rounding errors only.
    return bool(np.allclose(values, others, rtol=0, atol=1e-5 * np.abs(values).max(initial=0.1)))


def _explain_growth(evidence: Evidence, differences: Differences) -> Finding | None:
    """Recognizes metrics, such as the loss of Keras' `fit`, that grow with the replicas in each step."""
    return next(((d, causes.METRIC_GROWS) for d in differences if _grows(evidence, d)), None)


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


def _explain_metric(evidence: Evidence, differences: Differences) -> Finding | None:
    """Recognizes metrics that are averaged over the replicas, or count padding."""
    for difference in differences:
        if difference.split.even and difference.has_factor(1 / difference.split.replicas):
            return difference, causes.METRIC_NOT_SUMMED
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
        if not any(_close(value, mean) for mean in means):
            matches.discard(causes.METRIC_AVERAGED)
        if not subject.pads_rows or not _close(value, measure([*indexes, *padding])):
            matches.discard(causes.METRIC_PADDING)
        if len(matches) < 2:
            break
    return matches


def _explain_state(evidence: Evidence, differences: Differences) -> Finding | None:
    """Recognizes variables that each replica changes."""
    first = differences[0]
    key, replicas = ("state", first.name), first.split.replicas
    records = evidence.records[first.split], evidence.references[first.split.batch]
    changed, expected = (each.steps[0][key] - each.start.get(key, 0) for each in records)
    factor = common_factor(changed, expected, _CLOSE)
    added = factor is not None and abs(factor / replicas - 1) < _CLOSE
    return first, causes.ADDED_BY_EACH if added else causes.OWN_UPDATE


# The kinds of differences that a rule explains, those in whose presence it does not, and the rule.
_TRAINING = ("update", "statistic")
_RULES: Sequence[tuple[Sequence[str], Sequence[str], Rule]] = (
    (("update", "loss", "metric", "statistic", "state", "copy"), (), _explain_shared),
    (("statistic",), (), _explain_statistics),
    (("copy",), (), _explain_copies),
    (("update", "loss"), (), _explain_rows),
    (("update",), (), explain_update),
    (("metric", "loss"), _TRAINING, _explain_growth),
    (("loss",), ("update",), lambda _, differences: (differences[0], causes.LOSS)),
    (("evaluation",), (*_TRAINING, "loss", "metric", "state", "copy"), _explain_rows),
    (("metric", "evaluation"), _TRAINING, _explain_metric),
    (("state",), ("update",), _explain_state),
)


def explain_random(evidence: Evidence) -> Finding | None:
    """Recognizes mistakes in spite of random numbers: equal draws, and draws in an evaluation."""
    run: Any = evidence.run
    if noise.find_narrow(run):
        return None
    reference = run.record()
    split = Split(2 * (run.split.batch // 2), 2)
    if not reference.trains:
        other = noise.record_reversed(run, reference).steps[0]
        for (kind, name), value in reference.steps[0].items():
            distance = float(np.abs(other[kind, name] - value).max(initial=0.0))
            if kind in ("loss", "metric") and distance:
                return Difference(kind, name, split, 0, None, distance), causes.EVALUATION_NOISE
        return None
    # If only another order of the rows changes the result, it may do so by rounding errors.
    threshold = _CLOSE if evidence.calibration.random else _ROUNDING
    if attempt(lambda: _draws_same_numbers(evidence, split, threshold)):
        first = next(name for kind, name in reference.steps[0] if kind == "update")
        size = float(np.abs(reference.flat_update()).max())
        return Difference("update", first, split, 0, None, size), causes.RANDOM
    return None


def _draws_same_numbers(evidence: Evidence, split: Split, threshold: float) -> bool:
    """Returns whether two replicas with the same rows compute the same as one of them.

    The rows are all equal, so that only random numbers can make them different.
    """
    subject = evidence.subject.select([0] * split.batch)
    half = subject.start(Split(split.batch // 2)).record(steps=1)
    both, several = (
        subject.start(each).record(half.names, steps=1) for each in (split.reference, split)
    )
    return (
        noise.relative_distance(several, half) < _CLOSE
        and noise.relative_distance(both, half) > threshold
    )
