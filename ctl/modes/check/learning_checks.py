"""Checks of the first steps: the initial loss, the gradients, and whether one batch is learned."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.built.flops import list_graphs
from ctl.built.inner_loop import plan_of, step_of
from ctl.checks import onednn
from ctl.errors import NonFiniteStep, list_some
from ctl.modes import messages
from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome
from ctl.modes.check.trainer_factory import TrainerFactory
from ctl.testing.contents import contents_of, name_models, values_of
from ctl.trainer import StandardTrainer
from ctl.update.preprocessing import call_sample_weight

_MEMORIZED = 0.1  # of the first loss: a model that has memorized one batch is far below
_STEPS, _LOOPS = 20, 5  # steps per inner loop, and loops, when one batch is overfitted
_CHANGE = (
    0.01  # the norm of the change by each of the further steps, if the gradient stays as it is
)
_MORE_STEPS = 9  # for models that are not updated in the first step
_LOWER_RATE = "check the labels, and lower optimizer.learning_rate"
# Relative to the first loss: below _LEARNED the batch was learned. The minimum of other losses than a
# classifier's, such as a contrastive loss, can be far above 0, so _LOWERED is enough. An increase of
# up to _NOISE is no failure, since dropout alone moves the loss.
_LEARNED, _LOWERED, _NOISE = 0.5, 0.9, 0.5


def check_first_loss(factory: TrainerFactory) -> Outcome:
    """Checks that the loss of an untrained classifier is about the loss of a uniform guess."""
    trainer, batch = factory.experiment.trainer, factory.read_batches(1)[0]
    if not plan_of(trainer).has_loss:
        return _judge_loss_of_own_step(factory)
    losses, outputs, weights = _compute_losses(trainer, batch)
    if not np.isfinite(losses).all():
        return Outcome(
            FAIL,
            f"{int((~np.isfinite(losses)).sum())} of {losses.size} losses are not finite",
            "inspect these examples and per_example_loss: a logarithm of 0, a division by 0",
        )
    if weights is not None and _counts_twice(losses, weights):
        return Outcome(
            WARNING,
            f"{losses.mean():.4g}; the losses are proportional to the sample weights "
            f"{weights.min():g} to {weights.max():g}, so a sum over the tokens of a row is multiplied "
            "by their number, which counts each token twice",
            "let per_example_loss return the mean over the tokens of a row, or the loss of each token "
            "with a weight for each token",
        )
    loss = float(losses.mean())
    classes = _count_classes(trainer, batch, outputs, losses, weights)
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


def _judge_loss_of_own_step(factory: TrainerFactory) -> Outcome:
    """Returns the outcome for a trainer that overrides the step and defines no other loss."""
    _, losses = factory.first_steps
    if not losses:
        return Outcome(WARNING, "not run: the outputs of the trainer's loop have no loss")
    if not math.isfinite(losses[0]):
        return Outcome(
            FAIL,
            f"{losses[0]}, in replica_step",
            "inspect replica_step: a logarithm of 0, a division by 0",
        )
    return Outcome(PASS, f"{losses[0]:.4g}, in replica_step; the chance level is unknown")


def check_gradients(factory: TrainerFactory) -> Outcome:
    """Checks that one step of plain SGD changes each trainable variable of every model.

    An optimizer that the trainer makes itself is not replaced. If a variable does not change, a few
    more steps are made from the first weights: some models are updated only every few steps, and layers
    before one of zeros change in the second step. Their rate is small, because SGD would diverge.
    """
    # Small gradients vanish in float16, which would be reported as variables without a gradient.
    is_float16 = factory.experiment.config.runtime.precision == "float16"
    made: list[Any] = []

    def make_optimizer() -> Any:
        made.append(tf_keras.optimizers.SGD(1.0))
        return made[-1]

    trainer = factory.make_trainer(
        rows=factory.read_batches(1)[0],
        optimizer=make_optimizer,
        **({"precision": "float32"} if is_float16 else {}),
    )
    named, before = contents_of(trainer).name_variables(), values_of(trainer)
    variables = {name: v for (kind, name), v in named.items() if kind == "update"}
    unchanged = list(variables)
    for steps in (1, _MORE_STEPS):
        trainer.train(tf.constant(steps))
        after = values_of(trainer)
        unchanged = [
            n for n in unchanged if np.array_equal(after["update", n], before["update", n])
        ]
        # The only model is updated in every step.
        if not unchanged or len(name_models(trainer)) < 2:
            break
        changes = [np.ravel(after["update", n] - before["update", n]) for n in variables]
        for name, variable in variables.items():
            variable.assign(before["update", name])
        for sgd in made:
            sgd.learning_rate = _CHANGE / max(1.0, float(np.linalg.norm(np.concatenate(changes))))
    if unchanged:
        return Outcome(
            FAIL if len(unchanged) == len(variables) else WARNING,
            f"{len(unchanged)} of {len(variables)} trainable variables do not change: "
            f"{list_some(_name_by_model(trainer, unchanged, variables))}",
            "let the loss depend on them and an update train them, or set trainable=False on their "
            "layers, or on a variable of the trainer",
        )
    for text in onednn.find(op for graph in list_graphs(trainer) for op in graph.get_operations()):
        return Outcome(WARNING, text, onednn.FIX)
    models = len(name_models(trainer))
    of_models = f" of {models} models" if models > 1 else ""
    return Outcome(PASS, f"all {len(variables)} trainable variables{of_models} change")


def _name_by_model(
    trainer: StandardTrainer, names: Sequence[str], variables: Mapping[str, tf.Variable]
) -> list[str]:
    """Puts the name of the model in front of each variable's, if there are several models."""
    models = name_models(trainer)
    if len(models) < 2:
        return list(names)
    owners = {id(v): name for name, model in models.items() for v in model.trainable_variables}
    return [f"{owners.get(id(variables[name]), 'trainer')}: {name}" for name in names]


def check_overfitting(factory: TrainerFactory) -> Outcome:
    """Checks that the model can overfit one batch.

    The loss of a trainer with several optimizers need not fall, since the models may compete; all
    variables must stay finite.
    """
    try:
        trainer, first_losses = factory.first_steps
        losses = list(first_losses)
        while losses and trainer.global_step < 1 + _STEPS * _LOOPS:
            if losses[-1] < _MEMORIZED * losses[0]:
                break
            remainder = (int(trainer.global_step.numpy()) - 1) % _STEPS
            outputs = trainer.train(tf.constant(_STEPS - remainder)) or {}
            losses.append(float(outputs["loss"]))
    except NonFiniteStep as error:
        return Outcome(FAIL, error.what, _LOWER_RATE)
    if not losses:
        return Outcome(WARNING, "not run: the outputs of the trainer's loop have no loss")
    first, last = losses[0], losses[-1]
    observation = f"loss {first:.4g} -> {last:.4g} in {int(trainer.global_step.numpy())} steps"
    infinite = [n for (_, n), v in values_of(trainer).items() if not np.isfinite(v).all()]
    if infinite:
        observation += f", and values that are not finite in {list_some(infinite)}"
        return Outcome(FAIL, observation, _LOWER_RATE)
    optimizers = len(contents_of(trainer).optimizers)
    if optimizers > 1 and np.isfinite(last) and last > _LEARNED * first:
        return Outcome(
            PASS, f"{observation}; it need not fall with {optimizers} optimizers, and all is finite"
        )
    if not last < first + _NOISE * abs(first):  # also true of NaN
        return Outcome(FAIL, observation, _LOWER_RATE)
    if last <= first - (1 - _LEARNED) * abs(first):  # a loss may be negative
        return Outcome(PASS, observation)
    if last <= first - (1 - _LOWERED) * abs(first) and not _is_classifier(factory):
        return Outcome(PASS, f"{observation}; not a classifier, so its minimum is unknown")
    return Outcome(
        WARNING,
        observation,
        "; ".join(messages.images(factory.experiment.trainer)[1:])
        or "raise optimizer.learning_rate or shorten its warm-up; check the labels, dropout and "
        "weight decay",
    )


def _is_classifier(factory: TrainerFactory) -> bool:
    trainer, batch = factory.experiment.trainer, factory.read_batches(1)[0]
    if not plan_of(trainer).has_loss:
        return False
    _, outputs, _ = _compute_losses(trainer, batch)
    return _count_classes(trainer, batch, outputs) is not None


def _compute_losses(
    trainer: StandardTrainer, batch: dict[str, Any]
) -> tuple[np.ndarray, Any, np.ndarray | None]:
    """Computes the losses and the sample weights of a batch and its outputs, without dropout."""
    tensors = tf.nest.map_structure(tf.convert_to_tensor, batch)
    with step_of(trainer).rows(tensors, None):
        prepared = trainer.preprocess(tensors)
        outputs = trainer.forward(prepared, training=False)
        losses = trainer.per_example_loss(prepared, outputs)
        weights = call_sample_weight(trainer, prepared, training=True)
    if isinstance(losses, Mapping):  # each may have a shape and weights of its own
        losses, weights = np.concatenate([np.ravel(value) for value in losses.values()]), None
    losses = np.asarray(losses, np.float64)
    return losses, outputs, None if weights is None else np.asarray(weights, np.float64)


def _counts_twice(losses: np.ndarray, weights: np.ndarray) -> bool:
    """Returns whether each row's loss is about one constant times its weight, a number of at least 1.

    The losses of an untrained model differ little from token to token, so their sum is about
    proportional to their number; their mean is not.
    """
    if losses.ndim != 1 or losses.shape != weights.shape:
        return False
    rows = weights > 0
    losses, weights = losses[rows], weights[rows]
    whole = len(weights) > 3 and bool((weights == np.round(weights)).all())
    if not whole or weights.std() < 0.1 * weights.mean() or losses.min() <= 0:
        return False
    per_token = losses / weights
    logs = np.log(losses), np.log(weights)
    correlation, slope = np.corrcoef(*logs)[0, 1], np.polyfit(logs[1], logs[0], 1)[0]
    # The loss of a token varies less than the loss of a row.
    steady = per_token.std() / per_token.mean() < 0.5 * losses.std() / losses.mean()
    return bool(steady and correlation > 0.9 and abs(slope - 1) < 0.2)


def _count_classes(
    trainer: StandardTrainer,
    batch: dict[str, Any],
    outputs: Any,
    losses: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> int | None:
    """Returns the number of classes, if integer labels [rows] have one output [rows, classes].

    With the losses of pixels or tokens, [rows, ...], labels and outputs may have these dimensions, too.
    Labels without a weight, such as those of pixels to ignore, need not be a class.
    """
    label = batch.get("label")
    if (
        label is None
        or trainer.options.loss_weights  # not one loss of a classifier
        or isinstance(label, dict)
        or not np.issubdtype(label.dtype, np.integer)
        or (label.ndim > 1 and (losses is None or losses.shape != label.shape))
    ):
        return None
    if not tf.is_tensor(outputs) or outputs.shape.rank != label.ndim + 1:
        return None
    if weights is not None and weights.shape == label.shape:
        label = label[weights > 0]
    count = int(outputs.shape[-1])
    return count if count > 1 and label.max(initial=0) < count else None  # it may be unsigned
