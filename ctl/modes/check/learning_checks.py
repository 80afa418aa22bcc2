"""Checks of the first steps: the initial loss, the gradients, and whether one batch is learned."""

import math
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.errors import NonFiniteStep, list_some
from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome
from ctl.modes.check.trainer_factory import TrainerFactory
from ctl.trainer import StandardTrainer

_STEPS, _LOOPS = 20, 5  # steps per inner loop, and loops, when one batch is overfitted
_LOWER_RATE = "check the labels, and lower optimizer.learning_rate"
# Relative to the first loss: below _LEARNED the batch was learned. An increase of up to _NOISE is
# no failure, since dropout alone moves the loss.
_LEARNED, _NOISE = 0.5, 0.5


def check_first_loss(factory: TrainerFactory) -> Outcome:
    """Checks that the loss of an untrained classifier is about that of a uniform guess."""
    trainer, batch = factory.experiment.trainer, factory.read_batches(1)[0]
    losses, outputs = _compute_losses(trainer, batch)
    if not np.isfinite(losses).all():
        return Outcome(
            FAIL,
            f"{int((~np.isfinite(losses)).sum())} of {losses.size} losses are not finite",
            "inspect these examples and per_example_loss: a logarithm of 0, a division by 0",
        )
    loss, classes = float(losses.mean()), _count_classes(batch, outputs)
    if classes is None:
        return Outcome(PASS, f"{loss:.4g}; not a classifier, so the chance level is unknown")
    chance = math.log(classes)  # the cross entropy of a uniform distribution
    observation = f"{loss:.4g}; a uniform guess among {classes} classes has {chance:.4g}"
    if 0.5 * chance <= loss <= 2.0 * chance:
        return Outcome(PASS, observation)
    return Outcome(
        WARNING,
        observation,
        "check the scale of the inputs and of the last layer's weights, and from_logits",
    )


def check_gradients(factory: TrainerFactory) -> Outcome:
    """Checks that one step of plain SGD changes each trainable variable."""
    # Small gradients vanish in float16, which would be reported as variables without a gradient.
    is_float16 = factory.experiment.config.runtime.precision == "float16"
    trainer = factory.make_trainer(
        rows=factory.read_batches(1)[0],
        optimizer=lambda: tf_keras.optimizers.SGD(1.0),
        **({"precision": "float32"} if is_float16 else {}),
    )
    variables = trainer.model.trainable_variables
    before = [variable.numpy() for variable in variables]
    trainer.train(tf.constant(1))
    unchanged = [
        variable.name
        for variable, value in zip(variables, before, strict=True)
        if np.array_equal(variable.numpy(), value)
    ]
    if unchanged:
        return Outcome(
            FAIL if len(unchanged) == len(variables) else WARNING,
            f"{len(unchanged)} of {len(variables)} trainable variables do not change: "
            f"{list_some(unchanged)}",
            "let the loss depend on them, or set trainable=False on their layers",
        )
    return Outcome(PASS, f"all {len(variables)} trainable variables change")


def check_overfitting(factory: TrainerFactory) -> Outcome:
    """Checks that the model can overfit one batch."""
    trainer = factory.make_trainer(rows=factory.read_batches(1)[0])
    losses: list[float] = []
    for steps in (1, *[_STEPS] * _LOOPS):
        try:
            outputs = trainer.train(tf.constant(steps)) or {}
        except NonFiniteStep as error:
            return Outcome(FAIL, error.what, _LOWER_RATE)
        if "loss" not in outputs:
            return Outcome(WARNING, "not run: the outputs of the trainer's loop have no loss")
        losses.append(float(outputs["loss"]))
        if losses[-1] < 0.1 * losses[0]:
            break
    first, last = losses[0], losses[-1]
    observation = f"loss {first:.4g} -> {last:.4g} in {1 + _STEPS * (len(losses) - 1)} steps"
    if not last < first + _NOISE * abs(first):  # also true of NaN
        return Outcome(FAIL, observation, _LOWER_RATE)
    if last > _LEARNED * first:
        return Outcome(
            WARNING,
            observation,
            "raise optimizer.learning_rate or shorten its warm-up; check the labels, dropout and "
            "weight decay",
        )
    return Outcome(PASS, observation)


def _compute_losses(trainer: StandardTrainer, batch: dict[str, Any]) -> tuple[np.ndarray, Any]:
    """Computes the [rows] losses of a batch and the model's outputs, without dropout."""
    prepared = trainer.preprocess({k: tf.convert_to_tensor(v) for k, v in batch.items()})
    outputs = trainer.forward(prepared, training=False)
    return np.asarray(trainer.per_example_loss(prepared, outputs), np.float64), outputs


def _count_classes(batch: dict[str, Any], outputs: Any) -> int | None:
    """The number of classes, if integer labels [rows] belong to one output [rows, classes]."""
    label = batch.get("label")
    if label is None or not np.issubdtype(label.dtype, np.integer) or label.ndim > 1:
        return None
    if not tf.is_tensor(outputs) or outputs.shape.rank != 2:
        return None
    count = int(outputs.shape[1])
    return count if count > 1 and label.max() < count else None
