"""Checks that a resumed run computes the same as an uninterrupted one."""

import tempfile

import numpy as np
import tensorflow as tf

from ctl.errors import list_some
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome
from ctl.modes.check.trainer_factory import TrainerFactory
from ctl.testing.contents import values_of

_STEPS = 2  # steps before the checkpoint, and again after it
_TOLERANCE = 1e-4  # relative to a variable's largest element


def check_round_trip(factory: TrainerFactory) -> Outcome:
    """Trains, saves and trains on; then repeats the second half from the checkpoint.

    The resumed trainer is a new object, so state that is in no checkpoint shows as a difference.
    """
    trainer = factory.make_trainer()
    trainer.train(tf.constant(_STEPS))
    with tempfile.TemporaryDirectory(prefix="ctl-check-") as folder:
        Checkpointer(folder, trainer).save()
        trainer.train(tf.constant(_STEPS))
        resumed = factory.make_trainer()
        Checkpointer(folder, resumed).all_restore_latest()
        # TensorFlow restores a variable that this step creates, such as a slot, when it is created.
        resumed.train(tf.constant(_STEPS))
    expected, actual = values_of(trainer), values_of(resumed)
    if len(expected) != len(actual):
        return Outcome(
            FAIL,
            f"{len(expected)} variables of the models and optimizers became {len(actual)}",
            "create the same variables in every run",
        )
    # Compared by position: Keras numbers layer names per process, so the names differ.
    pairs = zip(expected.values(), actual.values(), strict=True)
    distances = [_distance(a, b) for a, b in pairs]
    different = [name for (_, name), d in zip(expected, distances, strict=True) if d]
    if not different:
        return Outcome(PASS, f"all {len(expected)} variables the same, bit for bit")
    largest = max(distances)
    observation = (
        f"{len(different)} of {len(expected)} variables differ, by up to {largest:.1g} of their "
        f"size: {list_some(different)}"
    )
    if largest < _TOLERANCE:
        return Outcome(
            WARNING, observation, "set runtime.deterministic=true for bitwise reproducible steps"
        )
    return Outcome(
        FAIL,
        observation,
        "keep all state that a step depends on in tf.Variables that are attributes of the trainer, "
        "and draw random numbers by ctl's layers or by tf.random.stateless_* from "
        "self.options.seed and the step",
    )


def _distance(expected: np.ndarray, actual: np.ndarray) -> float:
    """Returns the largest difference relative to the largest element; 0 if all bits agree."""
    if expected.tobytes() == actual.tobytes():
        return 0.0
    expected = expected.astype(np.float64)
    difference = np.abs(expected - actual.astype(np.float64)).max()
    return float(difference / max(np.abs(expected).max(), 1e-30))
