"""The variables that the code of a step may change, and the items of a checkpoint."""

import pkgutil
from typing import Any, TypeAlias

import tensorflow as tf
import tf_keras

from ctl.built.attributes import Attributes, Owner
from ctl.keras import models
from ctl.keras.variables import moving_statistics, variables_of
from ctl.update.snapshot import Assignable

_STATE_DICT = "ctl.built.state_dicts:StateDict"  # imported for an object that has one
Trackable: TypeAlias = tf.__internal__.tracking.Trackable  # a model, an optimizer, a variable, ...


def assignable(attributes: Attributes) -> Assignable:
    """Returns every variable that the code of a step may assign.

    Only optimizers assign their own variables, but for the learning rate, and ctl counts the steps.
    """
    owner = attributes.owner
    counters = {id(owner.global_step), id(owner.skipped_steps)}
    variables: dict[int, tf.Variable] = {}
    statistics: set[int] = set()
    plain: set[int] = set()
    for _, value in attributes.values():
        if isinstance(value, tf.Variable):
            variables[id(value)] = value
        # tf_keras raises an error for the variables of a model that is not built.
        elif isinstance(value, tf.Module) and (
            not isinstance(value, tf_keras.Model) or value.built
        ):
            variables |= {id(variable): variable for variable in variables_of(value)}
            if isinstance(value, tf_keras.layers.Layer):
                statistics |= moving_statistics(value)
                plain |= moving_statistics(value, plain=True)
    rates = [each.learning_rate for each in attributes.optimizers()]
    variables |= {id(v): v for v in rates if isinstance(v, tf.Variable)}
    variables |= {id(v): v for m in attributes.layer_metrics().values() for v in m.variables}
    once, summed = [], []
    for key, variable in variables.items():
        if key in statistics or is_sum(variable):
            summed.append(variable)
        elif key not in counters:
            once.append(variable)
    return Assignable(once, summed, [v for key, v in variables.items() if key in plain])


def state_of(attributes: Attributes) -> list[tf.Variable]:
    """Returns what `assignable` does, without metrics, which every loop and evaluation resets."""
    metrics = [v for _, v in attributes.values() if isinstance(v, tf_keras.metrics.Metric)]
    metrics += attributes.layer_metrics().values()
    reset = {id(variable) for metric in metrics for variable in metric.variables}
    held = assignable(attributes)
    return [v for v in (*held.once, *held.summed) if id(v) not in reset]


def checkpoint_items(owner: Owner) -> dict[str, Trackable]:
    """Returns every model, optimizer, variable and object with a `state_dict`, by its attribute."""
    function = tf.types.experimental.PolymorphicFunction
    trackable = tf.__internal__.tracking.Trackable
    stateless = (tf_keras.metrics.Metric, tf.data.Dataset, tf.data.Iterator, function)
    # Every loop resets these, or makes them again from `global_step`.
    excluded = ("metrics", "_train_dataset", "_train_iter", "_train_loop_fn")
    values = {name: as_entry(name, value) for name, value in vars(owner).items()}
    return {
        name: _adapt_all(value)
        for name, value in values.items()
        if isinstance(value, trackable)
        and not isinstance(value, stateless)
        and name not in excluded
        and not name.startswith("_self_")
    }


def as_entry(name: str, value: Any) -> Any:
    """Returns an object with `state_dict` as an entry of a checkpoint, and any other as it is."""
    is_state = not isinstance(value, type | tf.__internal__.tracking.Trackable) and all(
        callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
    )
    return pkgutil.resolve_name(_STATE_DICT)(name, value) if is_state else value


def _adapt_all(value: Any) -> Any:
    """Returns an attribute with the adapters of models of Keras 3, also in a list, tuple or dict."""
    if isinstance(value, list | tuple | dict):
        each = tf.nest.flatten(value)
        adapted = [models.adapt(v) for v in each]
        if any(one is not two for one, two in zip(each, adapted, strict=True)):
            packed = tf.nest.pack_sequence_as(value, adapted)
            return tf.__internal__.tracking.wrap(packed)
        return value
    return models.adapt(value)


def is_sum(variable: tf.Variable) -> bool:
    """Returns whether each replica holds a part of a sum, as the variables of metrics do."""
    return (
        variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.SUM
    )
