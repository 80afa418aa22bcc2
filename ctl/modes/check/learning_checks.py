"""Looks at the first steps: what the loss begins with, what gradients reach, and what is learned."""

import math
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.errors import NonFiniteStep, list_some
from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome
from ctl.modes.check.trainer_factory import TrainerFactory
from ctl.trainer import StandardTrainer

_STEPS, _LOOPS = 20, 5  # of one batch
_LOWER = "look at the labels, and lower optimizer.learning_rate"
_LEARNED, _NOISE = 0.5, 0.5  # of the first loss; dropout alone moves it


def first_loss(blueprint: TrainerFactory) -> Outcome:
    """Whether an untrained classifier is as wrong as one that guesses."""
    trainer, batch = blueprint.experiment.trainer, blueprint.batches(1)[0]
    losses, outputs = _forward(trainer, batch)
    if not np.isfinite(losses).all():
        return Outcome(
            FAIL,
            f"{int((~np.isfinite(losses)).sum())} of {losses.size} losses are not finite",
            "look at these examples and at per_example_loss: a logarithm of 0, a division by 0",
        )
    loss, classes = float(losses.mean()), _classes(batch, outputs)
    if classes is None:
        return Outcome(PASS, f"{loss:.4g}; no classifier, so no chance level is known")
    chance = math.log(classes)
    told = f"{loss:.4g}, and guessing among {classes} classes is {chance:.4g}"
    if 0.5 * chance <= loss <= 2.0 * chance:
        return Outcome(PASS, told)
    return Outcome(
        WARNING,
        told,
        "look at the scale of the inputs and of the last layer's weights, and at from_logits",
    )


def gradients(blueprint: TrainerFactory) -> Outcome:
    """Whether each trainable variable moves under plain SGD."""
    precise = {"precision": "float32"} if _is_half(blueprint) else {}
    trainer = blueprint.trainer(
        rows=blueprint.batches(1)[0], optimizer=lambda: tf_keras.optimizers.SGD(1.0), **precise
    )
    variables = trainer.model.trainable_variables
    before = [variable.numpy() for variable in variables]
    trainer.train(tf.constant(1))
    still = [
        variable.name
        for variable, value in zip(variables, before, strict=True)
        if np.array_equal(variable.numpy(), value)
    ]
    if still:
        return Outcome(
            FAIL if len(still) == len(variables) else WARNING,
            f"{len(still)} of {len(variables)} trainable variables do not move: {list_some(still)}",
            "let the loss depend on them, or set trainable=False on their layers",
        )
    return Outcome(PASS, f"all {len(variables)} trainable variables move")


def one_batch(blueprint: TrainerFactory) -> Outcome:
    """Whether one batch can be learned by heart."""
    trainer = blueprint.trainer(rows=blueprint.batches(1)[0])
    losses: list[float] = []
    for steps in (1, *[_STEPS] * _LOOPS):
        try:
            outputs = trainer.train(tf.constant(steps)) or {}
        except NonFiniteStep as error:
            return Outcome(FAIL, error.what, _LOWER)
        if "loss" not in outputs:
            return Outcome(WARNING, "not run: the trainer's loop gives no loss")
        losses.append(float(outputs["loss"]))
        if losses[-1] < 0.1 * losses[0]:
            break
    steps = 1 + _STEPS * (len(losses) - 1)
    told = f"loss {losses[0]:.4g} -> {losses[-1]:.4g} in {steps} steps"
    if not losses[-1] < losses[0] + _NOISE * abs(losses[0]):
        return Outcome(
            FAIL,
            told,
            _LOWER,
        )
    if losses[-1] > _LEARNED * losses[0]:
        return Outcome(
            WARNING,
            told,
            "raise optimizer.learning_rate or shorten its warm-up; look at the labels, dropout and "
            "weight decay",
        )
    return Outcome(PASS, told)


def _forward(trainer: StandardTrainer, batch: dict[str, Any]) -> tuple[np.ndarray, Any]:
    prepared = trainer.preprocess({k: tf.convert_to_tensor(v) for k, v in batch.items()})
    outputs = trainer.forward(prepared, training=False)
    return np.asarray(trainer.per_example_loss(prepared, outputs), np.float64), outputs


def _classes(batch: dict[str, Any], outputs: Any) -> int | None:
    """How many classes there are, where integers label the rows of one output."""
    label = batch.get("label")
    if label is None or not np.issubdtype(label.dtype, np.integer) or label.ndim > 1:
        return None
    if not tf.is_tensor(outputs) or outputs.shape.rank != 2:
        return None
    count = int(outputs.shape[1])
    return count if count > 1 and label.max() < count else None


def _is_half(blueprint: TrainerFactory) -> bool:
    return bool(blueprint.experiment.config.runtime.precision == "float16")
