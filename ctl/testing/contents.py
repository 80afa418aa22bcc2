"""Lists the variables, optimizers and metrics that a loop or a trainer holds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import itertools
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.step import Step
from ctl.testing.logical_devices import copies
from ctl.trainer import StandardTrainer

Name = tuple[str, str]  # kind of a quantity, name of the quantity
Names = tuple[Name, ...]
_STATISTICS = ("moving_mean", "moving_variance")


class Contents:
    """The variables, models, optimizers and metrics of a loop, without repetitions.

    Args:
        variables: models, layers, optimizers, metrics, variables and `ctl.Step`s, also in nested lists
            and dicts.

    Raises:
        UsageError: an object has no variables.
    """

    def __init__(self, variables: Any):
        items = []
        for _, item in named_leaves(variables):
            items += holders(vars(item)) if isinstance(item, Step) else [item]
        self.items = list({id(item): item for item in items}.values())
        for item in self.items:
            if not has_variables(item) and not hasattr(value_of(item), "assign"):
                raise UsageError(
                    f"variables of the loop contains {type(item).__name__}, which has no "
                    "variables: give models, optimizers, metrics, variables and ctl.Steps."
                )

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers; those that others wrap for a loss scale are not among them."""
        return [item for item in self.items if hasattr(item, "apply_gradients")]

    @property
    def metrics(self) -> list[Any]:
        """The metrics, including the metrics of compiled models."""
        models = [item for item in self.items if hasattr(item, "compute_loss")]
        nested = [metric for model in models for metric in getattr(model, "metrics", [])]
        own = [item for item in self.items if hasattr(item, "update_state")]
        return list({id(item): item for item in (*own, *nested)}.values())

    @property
    def layers(self) -> list[Any]:
        """All layers, including those of the models."""
        models = [item for item in self.items if hasattr(item, "_flatten_layers")]
        return [layer for model in models for layer in model._flatten_layers()]

    def name_variables(self, names: Sequence[Names] = ()) -> dict[Name, tf.Variable]:
        """Names each numeric variable by its kind and its own name, in a fixed order.

        Args:
            names: `Record.names` of the same loop on another split, whose layers Keras numbered
                differently; the names of the stage with variables of the same kinds are used instead.
        """
        named: dict[Name, tf.Variable] = {}
        ids: set[int] = set()
        for kind, item in self._each_variable():
            variable = value_of(item)
            numeric = variable.dtype.is_floating or variable.dtype.is_integer
            if id(variable) not in ids and numeric:
                ids.add(id(variable))
                named[free_name(named, kind, getattr(item, "path", None) or item.name)] = variable
        kinds = [kind for kind, _ in named]
        for stage in names:
            if [kind for kind, _ in stage] == kinds:
                return dict(zip(stage, named.values(), strict=True))
        return named

    def _each_variable(self) -> Iterator[tuple[str, Any]]:
        for item in self.items:
            if not has_variables(item):
                yield ("update" if item.trainable else "state"), item
            elif hasattr(item, "update_state"):
                yield from (("metric", v) for v in _call(item.variables))
            elif hasattr(item, "apply_gradients"):
                yield from (("state", v) for v in _call(item.variables))
                scale: Any = getattr(item, "_loss_scale", None)  # in tf_keras, not in `variables`
                if isinstance(getattr(scale, "current_loss_scale", None), tf.Variable):
                    yield from (("state", v) for v in (scale.current_loss_scale, scale.counter))
            else:
                yield from _variables_of_model(item)
                for metric in getattr(item, "metrics", []):  # from compile(), not in `variables`
                    yield from (("metric", v) for v in _call(metric.variables))


def _variables_of_model(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the kind of each variable of a model, a layer or a module, and the variable."""
    # The vocabulary of a layer such as TextVectorization is a lookup table.
    variables = [v for v in _call(item.variables) if hasattr(v, "trainable")]
    is_layer = hasattr(item, "get_config")
    own = [v for v in variables if v.trainable]
    # Without the variables of a frozen layer.
    trained = {id(v) for v in getattr(item, "trainable_variables", own)}
    for v in sorted(variables, key=lambda v: id(v) not in trained):
        moving = any(name in (getattr(v, "path", "") or v.name) for name in _STATISTICS)
        other = "statistic" if moving and is_layer else "state"
        yield ("update" if id(v) in trained else other), v


def contents_of(trainer: StandardTrainer) -> Contents:
    """Returns everything that a ctl trainer saves in its checkpoints."""
    return Contents(holders(trainer.checkpoint_items()))


def values_of(trainer: StandardTrainer) -> dict[Name, np.ndarray]:
    """Returns the value of each variable of a ctl trainer by its kind and name."""
    return read_all(trainer.strategy, contents_of(trainer).name_variables())


def holders(attributes: Mapping[str, Any]) -> list[Any]:
    """Returns the attributes of an object that are or have variables, also in lists and dicts.

    They are in the order of their names, so that it does not depend on the order of assignments.
    """
    leaves = (item for _, item in named_leaves(dict(sorted(attributes.items()))))
    return [item for item in leaves if isinstance(item, tf.Variable) or has_variables(item)]


def has_variables(item: Any) -> bool:
    """Returns whether an object is a model, layer, optimizer or metric, built or not."""
    # The property of a model that is not built raises an error.
    return hasattr(type(item), "variables") or "variables" in getattr(item, "__dict__", {})


def named_leaves(item: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each leaf of nested lists and dicts with its path, such as "members/1"."""
    if isinstance(item, dict):
        children = list(item.items())
    elif isinstance(item, list | tuple):
        children = list(enumerate(item))
    else:
        yield name, item
        return
    for key, value in children:
        yield from named_leaves(value, f"{name}/{key}" if name else str(key))


def free_name(taken: Mapping[Name, Any], kind: str, name: str) -> Name:
    """Returns a name that is not taken: "name", or "name#2", and so on."""
    numbered = (f"{name}#{number}" for number in itertools.count(2))
    names = ((kind, each) for each in itertools.chain([name], numbered))
    return next(each for each in names if each not in taken)


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


def read_value(strategy: tf.distribute.Strategy, variable: tf.Variable) -> np.ndarray:
    """Returns the value of a variable outside of the replicas, with local copies aggregated."""
    values = copies(strategy, variable)
    if len(values) > 1 and is_local(variable):
        if variable.aggregation == tf.VariableAggregation.SUM:
            return np.sum(values, axis=0)
        if variable.aggregation == tf.VariableAggregation.MEAN:
            return np.mean(values, axis=0)
    return values[0]


def read_all(
    strategy: tf.distribute.Strategy, named: Mapping[Name, tf.Variable]
) -> dict[Name, np.ndarray]:
    """Returns the value of each variable."""
    return {name: read_value(strategy, variable) for name, variable in named.items()}


def is_local(variable: tf.Variable) -> bool:
    """Returns whether each replica has a value of its own."""
    return variable.synchronization == tf.VariableSynchronization.ON_READ


def _call(variables: Any) -> Iterable[Any]:
    return list(variables() if callable(variables) else variables)


def value_of(variable: tf.Variable) -> Any:
    """Returns the variable of TensorFlow in a variable of Keras 3."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
