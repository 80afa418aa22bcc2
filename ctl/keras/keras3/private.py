"""The private names of Keras 3 that ctl uses, of Keras 3.12 to 3.15."""

import collections
from collections.abc import Iterator
import contextlib
import copy
import sys
from typing import Any

import tensorflow as tf

from ctl.keras.precision import Optimizer


def value_of(variable: Any) -> Any:
    """Returns the tf.Variable of a keras.Variable; None if it does not exist yet."""
    return variable._value  # the public `value` casts it under mixed precision


def set_value(variable: Any, value: tf.Variable) -> None:
    """Makes a keras.Variable hold another tf.Variable."""
    variable._value = value


def layers_of(layer: Any, *, recursive: bool) -> list[Any]:
    """Returns the layers inside of a layer, in the order of tf_keras: each before those inside of it."""
    found = {id(layer): layer}

    def visit(outer: Any) -> None:
        for each in outer._flatten_layers(include_self=False, recursive=False):
            if id(each) not in found:
                found[id(each)] = each
                if recursive:
                    visit(each)

    visit(layer)
    return list(found.values())[1:]


def variables_of(layer: Any, *, trainable: bool) -> list[Any]:
    """Returns the keras.Variables that a layer itself made, trainable or not."""
    return list(layer._trainable_variables if trainable else layer._non_trainable_variables)


def set_trainable(layer: Any, trainable: bool) -> None:
    """Freezes or unfreezes a layer without the layers inside of it."""
    layer._trainable = trainable
    for variable in layer._trainable_variables:
        variable.trainable = trainable


def seed_generators(layer: Any) -> list[Any]:
    """Returns the SeedGenerators that a layer itself made."""
    return list(layer._seed_generators)


def own_metrics(layer: Any) -> list[Any]:
    """Returns the metrics that a layer itself made."""
    return list(layer._metrics)


def losses_of(layer: Any) -> Any:
    """Returns the list of the losses that a layer added in its last call."""
    return layer._losses


def set_losses(layer: Any, losses: Any) -> None:
    """Replaces the list of the losses that a layer adds."""
    vars(layer)["_losses"] = losses  # its own __setattr__ would track the list


def excludes_from_weight_decay(optimizer: Optimizer) -> bool:
    """Returns whether `exclude_from_weight_decay` was called."""
    names = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
    return any(getattr(optimizer, name, None) for name in names)


def learning_rate_of(optimizer: Optimizer) -> Any:
    """Returns the learning rate of an optimizer, or its schedule."""
    return optimizer._learning_rate


def policy() -> Any:
    """Returns the global dtype policy of Keras 3; None if it is that of floatx."""
    policy = _states().get_global_attribute("dtype_policy")  # a layer makes it if the user set none
    return None if policy and policy.name == sys.modules["keras"].config.floatx() else policy


def set_policy(policy: Any) -> None:
    """Sets the global dtype policy of Keras 3, by its name or None for that of floatx."""
    if policy is None:
        _states().set_global_attribute("dtype_policy", None)
    else:
        sys.modules["keras"].config.set_dtype_policy(policy)


def _states() -> Any:
    """Returns the module with the global state of Keras 3; None if nothing has imported Keras 3."""
    return sys.modules.get("keras.src.backend.common.global_state")


def reset_names() -> None:
    """Numbers layers without a name of their own from the beginning."""
    states = _states()
    if states:
        states.set_global_attribute("object_name_uids", collections.defaultdict(int))


class CallState:
    """What the layers that are called now inherit from those that call them: training, and the dtype."""

    _NAMES = ("current_call_ctx", "autocast_scope")

    def __init__(self) -> None:
        # Later calls change the values, so they are copied.
        self._globals = _states()
        self._values = {name: copy.copy(value) for name, value in self._read().items()}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Sets the state in a `with` block to that of the time when this object was made."""
        current = self._read()
        self._write({name: copy.copy(value) for name, value in self._values.items()})
        try:
            yield
        finally:
            self._write(current)

    def _read(self) -> dict[str, Any]:
        if not self._globals:
            return {}
        return {name: self._globals.get_global_attribute(name) for name in self._NAMES}

    def _write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._globals.set_global_attribute(name, value)
