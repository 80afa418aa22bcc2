"""Checks for mistakes that no split reveals: small variances, and the loss scale of float16."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.testing.comparison import tolerance_of
from ctl.testing.diagnosis import causes
from ctl.testing.recording import Name, Record, name_models, record_run
from ctl.testing.report import Difference
from ctl.testing.splits import Split
from ctl.testing.trial_spec import TrialSpec, build_trainer
from ctl.trainer import StandardTrainer

_SCALE = 8.0  # a power of two, so that scaling is exact
_ROWS = 16
# float32 has 7 decimal digits, and the squares of these values differ in the 8th.
_MEAN, _DEVIATION = 3000.0, 0.3


def check(spec: TrialSpec, trainer: StandardTrainer) -> tuple[list[Difference], str, list[str]]:
    """Checks the normalization layers and the loss scale of a trainer that has no other mistake.

    Args:
        spec: what to run.
        trainer: a trainer of the spec.

    Returns:
        The differences, their cause, and notes on what could not be checked.
    """
    split = Split(2)
    layers = [layer for m in name_models(trainer).values() for layer in m._flatten_layers()]
    difference = check_normalization(layers, split)
    if difference:
        return [difference], causes.SQUARES, []
    if not _has_own_step(trainer):
        return [], "", []
    try:
        differences = _check_loss_scale(spec, split)
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        return [], "", [f"The loss scale was not checked, since float16 fails: {reason}"]
    return differences, causes.LOSS_SCALE if differences else "", []


def _has_own_step(trainer: StandardTrainer) -> bool:
    """Returns whether the trainer's class overrides a method that applies gradients."""
    cls, base = type(trainer), StandardTrainer
    return cls.replica_step is not base.replica_step or cls.train_step is not base.train_step


def check_normalization(layers: Iterable[Any], split: Split) -> Difference | None:
    """Checks one layer of each class; returns a difference for the first inexact variance."""
    layers = [layer for layer in layers if hasattr(layer, "moving_variance")]
    for layer in {type(layer): layer for layer in layers}.values():
        error = _normalization_error(layer)
        if error is not None and error > 0.1:
            return Difference("probe", f"variance of {layer.name}", split, 0, None, error)
    return None


def _normalization_error(layer: Any) -> float | None:
    """Returns the largest error of a new layer of the same kind, or None if it cannot be made."""
    channels = layer.moving_variance.shape[-1]
    axis = layer.axis[0] if isinstance(getattr(layer, "axis", None), list) else 1
    shape = [_ROWS] + [1] * (axis - 1) + [channels]
    normal = np.random.default_rng(0).normal(size=shape)
    x = (_MEAN + _DEVIATION * normal).astype(np.float32)
    try:
        config = {**layer.get_config(), "dtype": "float32", "name": "probe"}
        outputs = type(layer).from_config(config)(tf.constant(x), training=True).numpy()
    except Exception:  # from_config of a user's layer may fail in any way
        return None
    rows = tuple(range(len(shape) - 1))
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(rows)) / np.sqrt(wide.var(rows) + getattr(layer, "epsilon", 1e-3))
    error = np.abs(outputs - exact).max()
    return float(error) if np.isfinite(error) else float("inf")


def _check_loss_scale(spec: TrialSpec, split: Split) -> list[Difference]:
    """Compares one float16 step under two loss scales."""
    records: list[Record] = []
    for scale in (1.0, _SCALE):
        trainer = build_trainer(spec, split, precision="float16", loss_scale=scale)
        if not isinstance(trainer.optimizer, tf_keras.mixed_precision.LossScaleOptimizer):
            return []
        names = records[0].names if records else ()
        records.append(record_run(trainer, split, steps=1, names=names))
    plain, scaled = (_flat_update(record.steps[0]) for record in records)
    error = float(np.abs(plain - scaled).max(initial=0.0))
    # The comparison is false for NaN: if both steps overflow, there is nothing to compare.
    if not error > 4 * tolerance_of("float16") * max(float(np.abs(plain).max(initial=0.0)), 1e-6):
        return []
    name = f"update under the loss scale {_SCALE:g}"
    factor = float(plain @ scaled / (plain @ plain)) if plain @ plain else None
    proportional = factor is not None and abs(factor / _SCALE - 1) < 0.05
    return [Difference("probe", name, split, 0, _SCALE if proportional else None, error)]


def _flat_update(values: Mapping[Name, np.ndarray]) -> np.ndarray:
    return np.concatenate([v.ravel() for (kind, _), v in values.items() if kind == "update"])
