"""A look at the checkpoint: whether a run that is resumed is the run that was not."""

import tempfile

import numpy as np
import tensorflow as tf

from ctl.errors import list_some
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome
from ctl.modes.check.trainer_factory import TrainerFactory
from ctl.trainer import StandardTrainer

_STEPS = 2  # before the checkpoint, and after
_CLOSE = 1e-4  # of a variable's largest element


def round_trip(blueprint: TrainerFactory) -> Outcome:
    """Trains, saves, trains on; and does the latter again from the checkpoint in another trainer."""
    trainer = blueprint.trainer()
    trainer.train(tf.constant(_STEPS))
    with tempfile.TemporaryDirectory(prefix="ctl-check-") as folder:
        Checkpointer(folder, trainer).save()
        trainer.train(tf.constant(_STEPS))
        resumed = blueprint.trainer()
        Checkpointer(folder, resumed).restore_latest()
    resumed.train(tf.constant(_STEPS))
    one, other = _state(trainer), _state(resumed)
    # By place: Keras numbers the names of layers through a process.
    distances = [_distance(a[1], b[1]) for a, b in zip(one, other, strict=True)]
    away = [name for (name, _), distance in zip(one, distances, strict=True) if distance]
    if not away:
        return Outcome(PASS, f"all {len(one)} variables the same, bit for bit")
    worst = max(distances)
    told = f"{len(away)} of {len(one)} variables differ, by up to {worst:.1g} of their size"
    told = f"{told}: {list_some(away)}"
    if worst < _CLOSE:
        return Outcome(WARNING, told, "set runtime.deterministic=true for the same bits")
    return Outcome(
        FAIL,
        told,
        "keep all that a step depends on in tf.Variables held by the trainer, and draw random numbers "
        "by ctl's layers or by tf.random.stateless_* from self.options.seed and the step",
    )


def _state(trainer: StandardTrainer) -> list[tuple[str, np.ndarray]]:
    return [(v.name, v.numpy()) for v in (*trainer.model.variables, *trainer.optimizer.variables)]


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    if one.tobytes() == other.tobytes():
        return 0.0
    difference = np.abs(one.astype(np.float64) - other.astype(np.float64)).max()
    return float(difference / max(np.abs(one.astype(np.float64)).max(), 1e-30))
