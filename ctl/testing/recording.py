"""Runs a trainer and records everything that it computes as arrays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.evaluator import StandardEvaluator
from ctl.testing.devices import copies
from ctl.testing.nested import named_leaves, unwrap
from ctl.testing.splits import Split
from ctl.trainer import StandardTrainer

Name = tuple[str, str]  # kind of a quantity, name of the quantity
Names = tuple[Name, ...]


@dataclasses.dataclass(frozen=True)
class CopyMismatch:
    """A variable whose copies on the replicas differ after a step.

    Attributes:
        name: kind and name of the variable.
        step: the step after which they differ.
        distance: the largest absolute difference of an element.
        changed: the replicas whose copy the step changed.
        replicas: number of replicas.
    """

    name: Name
    step: int
    distance: float
    changed: tuple[int, ...]
    replicas: int


@dataclasses.dataclass(frozen=True)
class Record:
    """The values that a trainer computed on one split.

    Attributes:
        split: the split.
        weights: the trainable variables before the first step.
        steps: for each step, quantity -> value; an "update" is the change of a trainable variable.
        evaluation: results of an evaluation with the initial weights, if it was made.
        mismatches: the variables whose copies differ.
        names: the variables in order, before the first step and after the last one: an optimizer may
            create its slots in the first step.
    """

    split: Split
    weights: dict[str, np.ndarray]
    steps: list[dict[Name, np.ndarray]]
    evaluation: dict[Name, np.ndarray]
    mismatches: list[CopyMismatch]
    names: tuple[Names, ...] = ()


def record_run(
    trainer: StandardTrainer,
    split: Split,
    *,
    steps: int,
    evaluate: bool = False,
    names: Sequence[Names] = (),
) -> Record:
    """Trains a trainer and records every quantity after each step.

    Args:
        trainer: the trainer that `build_trainer` made for the split.
        split: the split.
        steps: number of training steps.
        evaluate: whether to evaluate before the first step.
        names: `Record.names` of the same trainer on another split, used instead of its own names.
    """
    evaluation = {}
    if evaluate:
        results = StandardEvaluator(trainer).evaluate(tf.constant(-1))
        evaluation = {("evaluation", name): v for name, v in flatten_numbers(results)}

    def train(step: int) -> dict[Name, np.ndarray]:
        outputs = trainer.train(tf.constant(1)) or {}
        return {
            ("loss" if name == "loss" else "metric", name): v
            for name, v in flatten_numbers(outputs)
            if name not in ("loss_scale", "skipped_steps")
        }

    record = record_steps(
        trainer.strategy, split, train, lambda: name_variables(trainer, names), steps=steps
    )
    return dataclasses.replace(record, evaluation=evaluation)


def record_steps(
    strategy: tf.distribute.Strategy,
    split: Split,
    train: Callable[[int], Mapping[Name, np.ndarray]],
    name_all: Callable[[], Mapping[Name, tf.Variable]],
    *,
    steps: int,
) -> Record:
    """Records the values that any training loop computes.

    Args:
        strategy: the strategy of the variables.
        split: the split.
        train: trains the step with this number, from 0, and returns what it reports.
        name_all: returns all variables by their names; a step may create some.
        steps: number of training steps.
    """
    named = first_named = name_all()
    values = {name: aggregate_copies(strategy, v) for name, v in named.items()}
    weights = {name: value for (kind, name), value in values.items() if kind == "update"}
    records, mismatches = [], []
    for step in range(steps):
        old = {name: copies(strategy, v) for name, v in named.items()}
        quantities = dict(train(step))
        named = name_all()  # with those that this step created
        for name, variable in named.items():
            value = aggregate_copies(strategy, variable)
            is_update = name[0] == "update" and name in values
            quantities[name] = value - values[name] if is_update else value
            values[name] = value
            new = copies(strategy, variable)
            if name[0] != "metric":  # each replica counts its own rows
                mismatches += _copy_mismatches(name, step, old.get(name, new), new, variable)
        records.append(quantities)
    stages = (tuple(first_named), tuple(named))
    return Record(split, weights, records, {}, mismatches, stages)


def name_variables(
    trainer: StandardTrainer, names: Sequence[Names] = ()
) -> dict[Name, tf.Variable]:
    """Names each numeric variable of a trainer by its kind and its own name.

    Args:
        trainer: the trainer.
        names: `Record.names` of another instance of the trainer, whose layers Keras numbered
            differently; the names of the stage with variables of the same kinds are used instead.
    """
    named: dict[Name, tf.Variable] = {}
    ids: set[int] = set()
    for kind, variable in _each_variable(trainer):
        numeric = variable.dtype.is_floating or variable.dtype.is_integer
        if id(variable) in ids or not numeric:
            continue
        ids.add(id(variable))
        name, count = variable.name, 2
        while (kind, name) in named:
            name, count = f"{variable.name}#{count}", count + 1
        named[kind, name] = variable
    kinds = [kind for kind, _ in named]
    for stage in names:
        if [kind for kind, _ in stage] == kinds:
            return dict(zip(stage, named.values(), strict=True))
    return named


def name_models(trainer: StandardTrainer) -> dict[str, tf_keras.layers.Layer]:
    """Returns every model of a trainer by its attribute, and the layers that are in no model.

    A model in a list or dict has a name such as "members/1".
    """
    items = named_leaves(trainer.checkpoint_items())
    layers = [(name, item) for name, item in items if isinstance(item, tf_keras.layers.Layer)]
    models = {id(model): (name, model) for name, model in reversed(layers)}
    parts = {
        id(layer) for _, model in layers for layer in model._flatten_layers(include_self=False)
    }
    return {name: model for key, (name, model) in models.items() if key not in parts}


def list_optimizers(trainer: StandardTrainer) -> list[Any]:
    """Returns every optimizer in the attributes of the trainer, including lists and dicts."""
    items = tf.nest.flatten(unwrap(trainer.checkpoint_items()))
    return list({id(item): item for item in items if hasattr(item, "apply_gradients")}.values())


def read_value(trainer: StandardTrainer, variable: tf.Variable) -> np.ndarray:
    """Returns the value of a variable outside of the replicas, with local copies aggregated."""
    return aggregate_copies(trainer.strategy, variable)


def aggregate_copies(strategy: tf.distribute.Strategy, variable: tf.Variable) -> np.ndarray:
    """Returns the value of a variable of a strategy, with local copies aggregated."""
    values = copies(strategy, variable)
    if len(values) > 1 and _is_local(variable):
        if variable.aggregation == tf.VariableAggregation.SUM:
            return np.sum(values, axis=0)
        if variable.aggregation == tf.VariableAggregation.MEAN:
            return np.mean(values, axis=0)
    return values[0]


def moving_statistics(model: tf_keras.layers.Layer) -> list[tf.Variable]:
    """Returns the moving means and variances of a model's normalization layers."""
    names = ("moving_mean", "moving_variance")
    values = [getattr(layer, name, None) for layer in model._flatten_layers() for name in names]
    return [variable for variable in values if variable is not None]


def _each_variable(trainer: StandardTrainer) -> Iterator[tuple[str, tf.Variable]]:
    """Yields the kind and the variable, in the order of the trainer's attributes."""
    for item in tf.nest.flatten(unwrap(trainer.checkpoint_items())):
        if isinstance(item, tf_keras.Model | tf_keras.layers.Layer):
            statistics = {id(v) for v in moving_statistics(item)}
            for v in item.trainable_variables:
                yield "update", v
            for v in item.non_trainable_variables:
                yield ("statistic" if id(v) in statistics else "state"), v
        elif hasattr(item, "apply_gradients"):
            variables = item.variables
            for v in variables() if callable(variables) else variables:
                yield "state", v
        elif isinstance(item, tf.Module):
            for v in item.variables:
                yield ("update" if v.trainable else "state"), v
        elif isinstance(item, tf.Variable):
            yield ("update" if item.trainable else "state"), item


def _is_local(variable: tf.Variable) -> bool:
    return variable.synchronization == tf.VariableSynchronization.ON_READ


def _copy_mismatches(
    name: Name, step: int, old: list[np.ndarray], new: list[np.ndarray], variable: tf.Variable
) -> list[CopyMismatch]:
    # A local variable that is summed has a different part of the sum on each replica.
    if _is_local(variable) and variable.aggregation == tf.VariableAggregation.SUM:
        return []
    if all(np.array_equal(copy, new[0], equal_nan=True) for copy in new):
        return []
    pairs = enumerate(zip(old, new, strict=True))
    changed = tuple(r for r, (before, after) in pairs if not np.array_equal(before, after))
    wide = [copy.astype(np.float64) for copy in new]
    distance = max(float(np.abs(copy - wide[0]).max(initial=0.0)) for copy in wide)
    return [CopyMismatch(name, step, distance, changed, len(new))]


def flatten_numbers(outputs: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name, such as "group/name", and the value of each number of nested dicts."""
    for name, value in outputs.items():
        if isinstance(value, dict):
            yield from flatten_numbers(value, f"{prefix}{name}/")
            continue
        array = np.asarray(value)
        if array.dtype.kind in "fiub":
            yield f"{prefix}{name}", array.astype(np.float64)
