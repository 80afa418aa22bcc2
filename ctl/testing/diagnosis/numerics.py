"""Mistakes that shares alone do not bring out: small variances, and the loss scale of float16."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.testing.comparison import tolerance_of
from ctl.testing.diagnosis import causes
from ctl.testing.recording import Plan, Record, build, record
from ctl.testing.report import Difference
from ctl.testing.splits import Split
from ctl.trainer import StandardTrainer

_SCALE = 8.0  # a power of two: it costs no digits
_ROWS = 16
_MEAN, _DEVIATION = 3000.0, 0.3  # float32 has 7 digits, the squares differ in the 8th


def look(plan: Plan, precision: str) -> tuple[list[Difference], str, list[str]]:
    """Looks at normalizations and the loss scale of a trainer that is right otherwise.

    Returns:
        The differences, their cause, and notes of what could not be looked at.
    """
    split = Split(2)
    trainer = build(plan, split, precision=precision)
    difference = _normalizations(trainer, split)
    if difference:
        return [difference], causes.SQUARES, []
    if not _has_own_step(trainer):
        return [], "", []
    try:
        found = _loss_scale(plan, split)
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        return [], "", [f"the loss scale was not looked at, since float16 does not run: {why}"]
    return found, causes.LOSS_SCALE if found else "", []


def _has_own_step(trainer: StandardTrainer) -> bool:
    """Whether the trainer applies gradients by code of its own."""
    mine, own = type(trainer), StandardTrainer
    return mine.replica_step is not own.replica_step or mine.train_step is not own.train_step


def _normalizations(trainer: StandardTrainer, split: Split) -> Difference | None:
    seen: set[type] = set()
    for layer in trainer.model._flatten_layers():
        if not hasattr(layer, "moving_variance") or type(layer) in seen:
            continue
        seen.add(type(layer))
        off = _deviation(layer)
        if off is not None and off > 0.1:
            return Difference("probe", f"variance of {layer.name}", split, 0, None, off)
    return None


def _deviation(layer: Any) -> float | None:
    """How far a fresh layer of the same kind is from the exact normalization; None if unknown."""
    draw = np.random.default_rng(0)
    channels = layer.moving_variance.shape[-1]
    axis = layer.axis[0] if isinstance(getattr(layer, "axis", None), list) else 1
    shape = [_ROWS] + [1] * (axis - 1) + [channels]
    x = (_MEAN + _DEVIATION * draw.normal(size=shape)).astype(np.float32)
    try:
        config = {**layer.get_config(), "dtype": "float32", "name": "probe"}
        fresh = type(layer).from_config(config)
        outputs = fresh(tf.constant(x), training=True).numpy()
    except Exception:  # a layer of somebody's own, which cannot be made anew
        return None
    rows = tuple(range(len(shape) - 1))
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(rows)) / np.sqrt(wide.var(rows) + getattr(layer, "epsilon", 1e-3))
    off = np.abs(outputs - exact).max()
    return float(off) if np.isfinite(off) else float("inf")


def _loss_scale(plan: Plan, split: Split) -> list[Difference]:
    records: list[Record] = []
    for scale in (1.0, _SCALE):
        once = dataclasses.replace(plan, steps=1)
        trainer = build(once, split, precision="float16", loss_scale=scale)
        if not isinstance(trainer.optimizer, tf_keras.mixed_precision.LossScaleOptimizer):
            return []
        names = records[0].names if records else ()
        records.append(record(trainer, once, split, evaluate=False, names=names))
    one, scaled = (_flat(each.steps[0]) for each in records)
    off = float(np.abs(one - scaled).max(initial=0.0))
    # Steps that both overflow leave nothing to compare.
    if not off > 4 * tolerance_of("float16") * max(float(np.abs(one).max(initial=0.0)), 1e-6):
        return []
    name = f"update under the loss scale {_SCALE:g}"
    factor = float(one @ scaled / (one @ one)) if one @ one else None
    close = factor is not None and abs(factor / _SCALE - 1) < 0.05
    return [Difference("probe", name, split, 0, _SCALE if close else None, off)]


def _flat(values: Any) -> np.ndarray:
    return np.concatenate([v.ravel() for (kind, _), v in values.items() if kind == "update"])
