"""Finds differences: between the splits, and mistakes that no split reveals."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.layers import recompute
from ctl.testing.comparison import compare
from ctl.testing.diagnosis import causes, rules
from ctl.testing.diagnosis.evidence import Evidence
from ctl.testing.equivalence_report import Difference, NotComparable
from ctl.testing.loop_record import LoopRecord
from ctl.testing.splits import Split

Found = tuple[list[Difference], str]  # the differences and their cause
NOTHING: Found = ([], "")
EVALUATION = "No trainable variable changed: compared as an evaluation."
_SCALE = 8.0  # a power of two, so that scaling is exact
_ROWS = 16
# float32 has 7 decimal digits, and the squares of these values differ in the 8th.
_MEAN, _DEVIATION = 3000.0, 0.3
_ROUNDING = 1e-9  # relative to the largest update, in float64
_NOT_COMPARED = "The optimizer was not compared: it may amplify the rounding errors of float32."
_RANDOM = "The optimizer was not compared: random numbers hide what its rounding errors are."


def run_checks(evidence: Evidence) -> Found:
    """Returns the differences that the first check finds, and their cause."""
    checks = [check_splits, check_normalization, check_loss_scale]
    if evidence.subject.scales_losses:  # updates that are not divided by the scale are too large
        checks.insert(0, check_loss_scale)
    checks += [check_recomputation, check_optimizers]
    return next((found for check in checks if (found := check(evidence))[0]), NOTHING)


def check_splits(evidence: Evidence) -> Found:
    """Compares each split with one replica, and explains the first difference."""
    differences = compare_splits(evidence)
    if not differences:
        return NOTHING
    return rules.explain(dataclasses.replace(evidence, differences=differences))


def compare_splits(evidence: Evidence) -> list[Difference]:
    """Returns the differences of all splits."""
    references = evidence.references
    pairs = [(record, references[split.batch]) for split, record in evidence.records.items()]
    return [each for pair in pairs for each in _compare(evidence, *pair)]


def check_recomputation(evidence: Evidence) -> Found:
    """Compares one replica with itself without `ctl.recompute`; its mistakes are on every split."""
    if not evidence.recomputes:
        return NOTHING
    record = next(iter(evidence.references.values()))
    with recompute.disabled():
        expected = evidence.subject.start(record.split).record(record.names)
    record = dataclasses.replace(record, evaluation={})  # an evaluation recomputes nothing
    return _compare(evidence, record, expected), causes.RECOMPUTED


def check_normalization(evidence: Evidence) -> Found:
    """Checks one layer of each class that normalizes, on values whose variance is small."""
    layers = [v for v in evidence.run.contents.layers if hasattr(v, "moving_variance")]
    for layer in {type(layer): layer for layer in layers}.values():
        if (error := _normalization_error(layer)) > 0.1:
            name = f"variance of {layer.name}"
            return [Difference("probe", name, Split(2), 0, None, error)], causes.SQUARES
    return NOTHING


def _normalization_error(layer: Any) -> float:
    """Returns the largest error of a new layer of the same kind, or 0 if it cannot be made."""
    channels = layer.moving_variance.shape[-1]
    axis = layer.axis[0] if isinstance(getattr(layer, "axis", None), list) else 1
    shape = [_ROWS] + [1] * (axis - 1) + [channels]
    normal = np.random.default_rng(0).normal(size=shape)
    x = (_MEAN + _DEVIATION * normal).astype(np.float32)
    try:
        config = {**layer.get_config(), "dtype": "float32", "name": "probe"}
        outputs = type(layer).from_config(config)(tf.constant(x), training=True).numpy()
    except Exception:  # from_config of a user's layer may fail in any way
        return 0.0
    rows = tuple(range(len(shape) - 1))
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(rows)) / np.sqrt(wide.var(rows) + getattr(layer, "epsilon", 1e-3))
    error = np.abs(outputs - exact).max()
    return float(error) if np.isfinite(error) else float("inf")


def check_loss_scale(evidence: Evidence) -> Found:
    """Checks that the update does not depend on the loss scale."""
    try:
        records = evidence.subject.scaled_records(evidence.run, _SCALE)
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        evidence.notes.append(f"The loss scale was not checked, since a step fails: {reason}")
        return NOTHING
    if records is None:
        return NOTHING
    plain, scaled = (record.flat_update() for record in records[:2])
    distance = float(np.abs(plain - scaled).max(initial=0.0))
    tolerance = records[2] or evidence.calibration.tolerance
    # The comparison is false for NaN: if both steps overflow, there is nothing to compare.
    if not distance > tolerance * max(float(np.abs(plain).max(initial=0.0)), 1e-6):
        return NOTHING
    name = f"update under a loss scale that is {_SCALE:g} times larger"
    square = plain @ plain
    factor = _SCALE if abs(plain @ scaled / _SCALE - square) < 0.05 * square else None
    return [Difference("probe", name, records[0].split, 0, factor, distance)], causes.LOSS_SCALE


def check_optimizers(evidence: Evidence) -> Found:
    """Repeats the comparison of a split on two replicas, if any, with the loop's own optimizers."""
    if not evidence.records or not evidence.subject.has_own_optimizers(evidence.run):
        return NOTHING
    if evidence.calibration.why or evidence.calibration.undecided:
        evidence.notes.append(_NOT_COMPARED if evidence.calibration.why else _RANDOM)
        return NOTHING
    subject = evidence.subject.with_own_optimizers()
    # An optimizer gets the same reduced gradients on every replica: two show what four would.
    split = min(evidence.records, key=lambda s: (s.replicas == 1, s.replicas, s.even))
    plain = evidence.references[split.batch]
    run = subject.start(split.reference)
    reference = run.record(plain.names)
    check_finite(reference)
    if plain.trains and not reference.trains:
        evidence.notes.append(f"With the loop's own optimizer: n{EVALUATION[1:]}")
    tolerance = max(evidence.calibration.tolerance, subject.measure_tolerance(run, reference))
    record = subject.with_state_of(run).start(split).record(reference.names)
    # Adam amplifies the rounding errors of gradients that are zero.
    zero = _zero_updates(plain)
    return compare(record, reference, subject.precision, tolerance, zero), causes.OPTIMIZER


def check_finite(record: LoopRecord) -> None:
    """Raises NotComparable if a loss or an update of a reference is not finite."""
    for step, values in enumerate(record.steps):
        for (kind, name), value in values.items():
            if kind in ("loss", "update") and not np.isfinite(value).all():
                label = name if kind == "loss" else f"{kind} of {name}"
                raise NotComparable(
                    f"The {label} is not finite on {record.split} at step {step}: give batches that "
                    "the model can be trained on, or compare one step (steps=1)."
                )


def _compare(evidence: Evidence, record: LoopRecord, reference: LoopRecord) -> list[Difference]:
    precision, tolerance = evidence.subject.precision, evidence.calibration.tolerance
    return compare(record, reference, precision, tolerance)


def _zero_updates(record: LoopRecord) -> set[str]:
    """Returns the variables whose gradients are zero except for rounding errors."""
    sizes = {
        name: max(float(np.abs(values["update", name]).max(initial=0.0)) for values in record.steps)
        for kind, name in record.steps[0]
        if kind == "update"
    }
    largest = max(sizes.values(), default=0.0)
    return {name for name, size in sizes.items() if size < _ROUNDING * largest}
