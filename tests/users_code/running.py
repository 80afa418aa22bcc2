"""Trains a case on one split of its batches, and compares two splits."""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl.keras import models
from tests.users_code.examples import EXAMPLES, ROWS


@dataclasses.dataclass(frozen=True)
class Split:
    """How the batches are split: replicas, rows, micro-batches; `ragged`: batches of 8, 8, 3."""

    replicas: int
    batch: int = 7
    micro_batches: int = 1
    ragged: bool = False

    @property
    def reference(self) -> "Split":
        return dataclasses.replace(self, replicas=1, micro_batches=1)


QUICK = Split(2)
# Under SGD an update shows the scale of its gradient. Both numbers are exact in float32, in which
# tf_keras may keep them.
OPTIMIZER = functools.partial(tf_keras.optimizers.SGD, 0.125, momentum=0.5)
STEPS = 3


def build(case: type, split: Split) -> Any:
    models.reset_names()  # layers without a name are numbered alike on every split
    options = dict(micro_batches=split.micro_batches, data={"ragged": split.ragged})
    return case(
        global_batch_size=split.batch,
        strategy=strategy(split.replicas),
        optimizer=OPTIMIZER,
        options=ctl.TrainerOptions(precision="float64", **options),
    )


@functools.cache
def strategy(replicas: int) -> tf.distribute.Strategy:
    return ctl.testing.make_strategy(replicas)


@functools.cache
def train(case: type, split: Split) -> dict[str, Any]:
    """Trains three steps; returns the outputs of each step, and each replica's variables."""
    trainer = build(case, split)
    outputs = dict(_named(trainer.train(tf.constant(1)) for _ in range(STEPS)))
    for name, variable in _variables(trainer):
        outputs[name], *others = ctl.testing.copies(trainer.strategy, variable)
        for other in others:
            np.testing.assert_array_equal(other, outputs[name], err_msg=f"the copies of {name}")
    return outputs


def _variables(trainer: Any) -> Iterator[tuple[str, tf.Variable]]:
    """The variables of the optimizer, and those that the case has made; not those of its metrics."""
    owned = vars(trainer)
    for name, value in [("optimizer", trainer.optimizer), *((n, owned[n]) for n in sorted(owned))]:
        value = models.adapt(value)
        if isinstance(value, tf.Variable):
            yield name, value
        elif isinstance(value, tf_keras.layers.Layer) or name == "optimizer":
            variables = value.variables() if callable(value.variables) else value.variables
            for i, variable in enumerate(variables):
                yield f"{name} {i} {variable.name}", variable


@functools.cache
def train_plainly(case: type, batch: int = QUICK.batch) -> dict[str, Any]:
    """The same three steps in eager TensorFlow, on one device and without ctl's step."""
    trainer, optimizer, outputs = build(case, Split(1, batch)), OPTIMIZER(), {}
    for step in range(STEPS):
        rows = np.arange(step * batch, (step + 1) * batch) % ROWS
        examples = {name: tf.constant(EXAMPLES[name][rows]) for name in case.features}
        examples = trainer.preprocess(examples)
        with trainer.build_scope(), tf.GradientTape() as tape:
            losses = trainer.per_example_loss(examples, trainer.forward(examples, training=True))
            weights = trainer.sample_weight(examples)
            weights = tf.ones_like(losses) if weights is None else tf.cast(weights, losses.dtype)
            loss = tf.reduce_sum(weights * losses) / tf.reduce_sum(weights)
            loss += sum(tf.reduce_sum(penalty) for penalty in trainer.model.losses)
        variables = trainer.model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        outputs[f"loss of step {step}"] = loss.numpy()
    named = {f"model {i} {v.name}": v.numpy() for i, v in enumerate(trainer.model.variables)}
    return outputs | named


def assert_right(row: Any, case: type, split: Split) -> None:
    """Asserts that a case of a row of the table trains as the row's plain loop, or as one replica."""
    outputs = train(case, split)
    if row.plain is None or split.ragged:
        reference = train(case, split.reference)
    else:
        reference = train_plainly(row.plain, split.batch)
    if row.plain not in (None, case):  # another model may have other variables
        reference = {name: value for name, value in reference.items() if name in outputs}
        assert any(name.startswith("model") for name in reference)
    assert difference(reference, outputs) <= 1e-10


def _named(results: Iterator[dict[str, tf.Tensor]]) -> Iterator[tuple[str, np.ndarray]]:
    for step, result in enumerate(results):
        for name, value in result.items():
            yield f"{name} of step {step}", np.asarray(value)


@functools.cache
def evaluate(case: type, replicas: int, batch: int) -> dict[str, Any]:
    """Evaluates the initial weights on 19 examples."""
    trainer = build(case, Split(replicas))
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=batch)
    return {name: np.asarray(v) for name, v in evaluator.evaluate(tf.constant(-1)).items()}


def difference(reference: dict[str, Any], outputs: dict[str, Any]) -> float:
    """The largest difference from a reference, relative to the largest element of a value or 1."""
    largest = 0.0
    for name, expected in reference.items():
        scale = max(1.0, float(np.max(np.abs(expected), initial=0)))
        gap = float(np.max(np.abs(outputs[name] - expected), initial=0)) / scale
        assert np.isfinite(gap), f"{name} is not finite"
        largest = max(largest, gap)
    return largest
