"""Learning rates, freezing and weight decay by the names of variables.

The layers and the optimizer apply them, so that the step has no special case.
"""

from collections.abc import Iterator, Mapping, Sequence
import fnmatch
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.configs.parameter_groups import patterns
from ctl.errors import UsageError, list_some
from ctl.replica import precision

_Names = list[tuple[tf.Variable, tuple[str, ...]]]


def freeze(model: tf_keras.Model, options: TrainerOptions) -> None:
    """Freezes the layers of the groups with frozen=True.

    A frozen layer is one with `trainable=False` in tf_keras: it has no gradients and no slots, and
    batch normalization uses its moving statistics and does not update them.

    Args:
        model: the built model.
        options: the trainer's options.

    Raises:
        UsageError: a pattern matches no variable, or only some of a layer's trainable variables.
    """
    groups = options.optimizer_groups
    if not groups:
        return
    names = _names(model)
    for group in groups:
        _check_matches("optimizer.groups", patterns(group), names)
    frozen = {id(v) for v, own in names if _group_of(own, groups).get("frozen")}
    for layer in model._flatten_layers(include_self=False):
        # Of a layer without trainable variables, such as moving statistics alone, all must match.
        variables = layer.trainable_variables or layer.variables
        if variables and all(id(v) in frozen for v in variables):
            layer.trainable = False
    left = [v.name for v in model.trainable_variables if id(v) in frozen]
    if left:
        raise UsageError(
            f"optimizer.groups freezes {list_some(left)}, but other variables of the same layer are "
            "trained: a layer can only be frozen as a whole, so let the pattern match all of them."
        )


def configure(optimizer: Any, model: tf_keras.Model, options: TrainerOptions) -> None:
    """Excludes variables from the weight decay, and scales the learning rate of others.

    Call it before `optimizer.build`.

    Args:
        optimizer: a tf_keras optimizer, which may be a LossScaleOptimizer.
        model: the built model.
        options: the trainer's options.

    Raises:
        UsageError: a pattern of `weight_decay_exclude` matches no variable.
    """
    exclude, groups = options.weight_decay_exclude, options.optimizer_groups
    if not exclude and not groups:
        return
    inner = optimizer.inner_optimizer if precision.has_loss_scale(optimizer) else optimizer
    names = _names(model)
    if exclude:
        _check_matches("optimizer.weight_decay_exclude", exclude, names)
        inner.exclude_from_weight_decay(var_list=[v for v, own in names if _matches(own, exclude)])
    scales = {
        inner._var_key(variable): scale
        for variable, own in names
        if (scale := _group_of(own, groups).get("learning_rate_scale"))
    }
    if scales:
        _scale_learning_rates(inner, scales)


def _scale_learning_rates(optimizer: Any, scales: Mapping[Any, float]) -> None:
    """Makes an optimizer multiply its learning rate by a factor while it updates a variable.

    Args:
        optimizer: a tf_keras optimizer.
        scales: the optimizer's key of a variable -> factor; the others have the factor 1.
    """
    cls = type(optimizer)

    class Scaled(cls):  # type: ignore[valid-type, misc]
        _ctl_scale: float | None = None  # the factor of the variable that is being updated

        @property
        def learning_rate(self) -> Any:
            rate = cls.learning_rate.fget(self)
            return rate if self._ctl_scale is None else rate * self._ctl_scale

        @learning_rate.setter
        def learning_rate(self, rate: Any) -> None:
            cls.learning_rate.fset(self, rate)

        def _apply_weight_decay(self, variables: Sequence[tf.Variable]) -> None:
            """Does nothing: `update_step` decays the variable just before its update instead."""

        def update_step(self, gradient: Any, variable: tf.Variable) -> None:
            self._ctl_scale = scales.get(self._var_key(variable))
            try:
                # The base class decays all variables with one rate.
                if self.weight_decay is not None and self._use_weight_decay(variable):
                    rate = tf.cast(self.learning_rate, variable.dtype)
                    decay = tf.cast(self.weight_decay, variable.dtype)
                    variable.assign_sub(variable * decay * rate)
                super().update_step(gradient, variable)
            finally:
                self._ctl_scale = None

    # The object stays the user's own, and a checkpoint of it the same: only its class is replaced.
    Scaled.__name__ = cls.__name__
    object.__setattr__(optimizer, "__class__", Scaled)


def _names(model: tf_keras.Model) -> _Names:
    """Returns each variable with its names: its own, and the path of layers that lead to it.

    The variables of a model inside of a model are named without the inner model: "conv/kernel", but
    its path is "backbone/conv/kernel".
    """
    paths = {id(variable): path for variable, path in _paths(model, "")}
    names = []
    for variable in model.variables:
        own = variable.name.partition(":")[0]
        names.append((variable, tuple(dict.fromkeys((own, paths.get(id(variable), own))))))
    return names


def _paths(layer: Any, prefix: str) -> Iterator[tuple[tf.Variable, str]]:
    for variable in layer.variables:
        yield variable, prefix + variable.name.partition(":")[0].rpartition("/")[-1]
    for inner in layer._flatten_layers(recursive=False, include_self=False):
        yield from _paths(inner, f"{prefix}{inner.name}/")


def _group_of(names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first group that has the variable."""
    return next((group for group in groups if _matches(names, patterns(group))), {})


def _matches(names: Sequence[str], wanted: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in wanted)


def _check_matches(key: str, wanted: Sequence[str], names: _Names) -> None:
    for pattern in wanted:
        if not any(_matches(own, [pattern]) for _, own in names):
            shown = list_some([own[-1] for _, own in names])
            raise UsageError(
                f"{key} has {pattern!r}, which no variable of the model matches: its variables are "
                f"{shown}."
            )
