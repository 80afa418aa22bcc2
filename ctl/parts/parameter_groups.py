"""Learning rates, freezing, optimizers and weight decay by the names of variables.

The layers and the optimizer apply them, so that the step has no special case.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import fnmatch
import functools
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.group_values import patterns
from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError, list_some
from ctl.keras import precision
from ctl.keras.precision import Optimizer
from ctl.keras.variables import variables_of
from ctl.optimizers import FromConfig
from ctl.parts import grouped_optimizer
from ctl.private import classes
from ctl.update.gradients import optimizers_of
from ctl.update.held_variables import Held
from ctl.update.part import Building, Part
from ctl.update.plan import Plan

Models = Mapping[str, tf_keras.Model]
_Names = list[tuple[tf.Variable, tuple[str, ...]]]


class ParameterGroups(Part):
    """Applies `optimizer_groups` and `weight_decay_exclude` to models and optimizers.

    Layers that a group freezes until a step are frozen as a function of the step alone, so that a
    resumed run does the same.
    """

    def __init__(self, options: TrainerOptions):
        self.options = options
        self._layers: list[tuple[tf_keras.layers.Layer, int]] = []  # frozen until a step
        self._seen: set[Any] = set()  # models
        self._configured: set[Any] = set()

    def prepare(self, optimizer: Optimizer, building: Building) -> None:
        """Freezes layers, and gives groups their learning rates and optimizers."""
        if optimizer is not building.optimizer:  # one of a group
            return
        if building.complete:
            check_patterns(building.models, self.options)
        freeze(building.models, self.options)
        groups = self.options.optimizer_groups
        others = [
            (_make_optimizer(groups[i]["optimizer"], i, building), variables)
            for i, variables in with_optimizers(building.models, groups).items()
        ]
        if others:
            grouped_optimizer.attach(optimizer, others)
        configure(optimizer, building.models, self.options)

    def create(self, plan: Plan, model: tf_keras.Model) -> None:
        """Freezes layers of the first model, whose optimizer has slot variables for them by now."""
        self._freeze_until({"": model})

    def add_models(self, models: Models) -> None:
        """Freezes layers of further models.

        Raises:
            UsageError: a pattern has no effect.
        """
        if self._seen == {*models.values()}:
            return
        check_patterns(models, self.options)
        # Only once: a trainer may unfreeze layers later, and `trainer.model` was frozen when built.
        new = {k: model for k, model in models.items() if k and model not in self._seen}
        for name, model in new.items() if self._seen else ():
            own = [
                _group_of(names, self.options.optimizer_groups)
                for _, names in _names({name: model})
            ]
            if isinstance(model, Held) and any(group.get("optimizer") for group in own):
                raise UsageError(
                    f"optimizer.groups has an optimizer for self.{name.partition('/')[0]}, which was "
                    "set after the optimizer was built: set it in build_model."
                )
        freeze(new, self.options)
        self._freeze_until(new)
        self._seen = {*models.values()}

    def configure(self, optimizer: Optimizer, models: Models) -> None:
        """Gives the variables of all models their learning rates in an optimizer."""
        key = frozenset([optimizer, *models.values()])
        if key not in self._configured:
            self._configured.add(key)
            configure(optimizer, models, self.options)

    def changes(self) -> Collection[int]:
        """Returns the steps from which on further layers are trained, in order."""
        return sorted({until for _, until in self._layers})

    def begin(self, step: int) -> None:
        """Freezes and unfreezes the layers for a step."""
        for layer, until in self._layers:
            # The property would also set the layers inside, each of which has its own entry.
            layer._trainable = step >= until

    def _freeze_until(self, models: Models) -> None:
        """Freezes the layers of groups with frozen_until.

        Args:
            models: the models by name, as for `freeze`.

        Raises:
            UsageError: a group matches only some of a layer's trainable variables, or the variables of
                a layer that is not trainable.
        """
        steps = frozen_until(models, self.options.optimizer_groups)
        if not steps:
            return
        known = {id(layer) for layer, _ in self._layers}  # a model may contain another one
        layers = {
            id(layer): layer
            for model in models.values()
            for layer in model._flatten_layers(include_self=False)
            # Only layers with variables of their own: a container's layers are handled one by one.
            if layer._trainable_weights or layer._non_trainable_weights
        }
        for layer in (layer for key, layer in layers.items() if key not in known):
            until = _steps_of_layer(layer, steps)
            if len(until) == 1 and until != {0}:
                self._layers.append((layer, until.pop()))
        self.begin(0)
        trained = [v for model in models.values() for v in model.trainable_variables]
        left = [variable.name for variable in trained if id(variable) in steps]
        if left:
            raise UsageError(
                f"optimizer.groups freezes {list_some(left)}, but other variables of the same layer not "
                "until the same step: a layer can only be frozen as a whole, so let the pattern match "
                "all of them."
            )


def _steps_of_layer(layer: Any, steps: Mapping[int, int]) -> set[int]:
    """Returns the steps until which the variables of a layer are frozen; 0 if they are not.

    Args:
        layer: the layer.
        steps: id of a variable -> the step until which it is frozen.
    """
    variables = (layer.trainable_variables if layer.trainable else []) or layer.variables
    until = {steps.get(id(variable), 0) for variable in variables}
    if until != {0} and not layer.trainable:
        raise UsageError(
            f"optimizer.groups unfreezes {list_some([v.name for v in variables])}, but the trainer sets "
            "trainable=False on the layer: leave it trainable in build_model, or let no pattern match "
            "it."
        )
    return until


def _make_optimizer(value: Any, index: int, building: Building) -> Any:
    """Returns the optimizer of a group: that of the config, or what a script gave."""
    name = f"optimizer.groups[{index}].optimizer"
    build = value if callable(value) else lambda: value
    if isinstance(value, Mapping):
        if not isinstance(building.source, FromConfig):
            raise UsageError(
                f"{name} is {dict(value)}, which only a config may have: pass a tf_keras optimizer, or "
                "a function that makes one."
            )
        build = functools.partial(building.source.make_group, index)
    try:
        optimizer = building.make(build)
    except UsageError as error:
        raise UsageError(f"In {name}: {error}") from None
    if precision.has_loss_scale(optimizer):
        raise UsageError(
            f"{name} is a LossScaleOptimizer, but the loss has one scale for all groups, which ctl sets "
            "by the precision: pass the optimizer inside of it."
        )
    return optimizer


def freeze(models: Models, options: TrainerOptions) -> None:
    """Freezes the layers of the groups with frozen=True.

    A frozen layer is one with `trainable=False` in tf_keras: it has no gradients and no slots, and
    batch normalization uses its moving statistics and does not update them.

    Args:
        models: the models of a trainer by name; "" is the name of `trainer.model`.
        options: the trainer's options.

    Raises:
        UsageError: a pattern matches only some of a layer's trainable variables.
    """
    groups = options.optimizer_groups
    if not groups:
        return
    frozen = {id(v) for v, own in _names(models) if _group_of(own, groups).get("frozen")}
    for model in (model for model in models.values() if model.built):
        for layer in model._flatten_layers(include_self=False):
            # In a layer without trainable variables, such as moving statistics alone, all must match.
            variables = layer.trainable_variables or layer.variables
            if variables and all(id(v) in frozen for v in variables):
                layer.trainable = False
        left = [v.name for v in model.trainable_variables if id(v) in frozen]
        if left:
            raise UsageError(
                f"optimizer.groups freezes {list_some(left)}, but other variables of the same layer are "
                "trained: a layer can only be frozen as a whole, so let the pattern match all of them."
            )


def frozen_until(models: Models, groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Returns id of a variable -> the step until which its group freezes it.

    Args:
        models: the models of a trainer by name, as for `freeze`.
        groups: `optimizer.groups`, with every `frozen_until` as a number of steps.
    """
    if not any(group.get("frozen_until") for group in groups):
        return {}
    steps = {id(v): _group_of(own, groups).get("frozen_until") for v, own in _names(models)}
    return {key: step for key, step in steps.items() if step}


def check_patterns(models: Models, options: TrainerOptions) -> None:
    """Checks that each pattern has an effect, once all models of a trainer exist.

    Raises:
        UsageError: a pattern matches no variable, or a model has no variables yet.
    """
    keys = {
        "optimizer.groups": [p for group in options.optimizer_groups for p in patterns(group)],
        "optimizer.weight_decay_exclude": options.weight_decay_exclude,
    }
    for key, wanted in keys.items():
        for name, model in models.items():
            if wanted and not model.built:
                raise UsageError(
                    f"{key} applies to all models, but self.{name.partition('/')[0]} is not built: "
                    "build it in the constructor, such as by its build(input_shape)."
                )
        names = _names(models) if wanted else []
        for pattern in wanted:
            if not any(_matches(own, [pattern]) for _, own in names):
                shown = list_some([own[-1] for _, own in names])
                raise UsageError(
                    f"{key} has {pattern!r}, a glob such as 'head/*', which no variable of the model "
                    f"matches: its variables are {shown}."
                )


def configure(optimizer: Optimizer, models: Models, options: TrainerOptions) -> None:
    """Excludes variables from the weight decay, and scales the learning rate of others.

    A second call, even after the optimizer was built, only adds further models.

    Args:
        optimizer: a tf_keras optimizer, which may be a LossScaleOptimizer.
        models: the models of a trainer by name, as for `freeze`.
        options: the trainer's options.
    """
    if options.weight_decay_exclude or options.optimizer_groups:
        names = _names(models)
        for inner in optimizers_of(optimizer):
            _configure(inner, names, options)


def with_optimizers(
    models: Models, groups: Sequence[Mapping[str, Any]]
) -> dict[int, list[tf.Variable]]:
    """Returns the groups that have an optimizer.

    Args:
        models: the models by name, as for `freeze`; the optimizer of the trainer updates the first one,
            and what is trained with it.
        groups: `optimizer.groups`.

    Returns:
        The number of a group -> the trainable variables of the model that are in it.

    Raises:
        UsageError: there are none, so that the optimizer would have no effect.
    """
    own = {name: model for name, model in models.items() if not name or isinstance(model, Held)}
    names = {id(variable): every for variable, every in _names(own)} if groups else {}
    trained = [variable for model in own.values() for variable in model.trainable_variables]
    members = [(v, _group_of(names.get(id(v), ()), groups)) for v in trained]
    result = {
        i: [variable for variable, own in members if own is group]
        for i, group in enumerate(groups)
        if group.get("optimizer") is not None
    }
    for i, variables in result.items():
        if not variables:
            raise UsageError(
                f"optimizer.groups[{i}].optimizer has no effect: no trainable variable of the model is "
                "in this group, because of its patterns or of an earlier group that matches first."
            )
    return result


def _configure(inner: Any, names: _Names, options: TrainerOptions) -> None:
    exclude, groups = options.weight_decay_exclude, options.optimizer_groups
    if exclude:
        # The optimizer's own method replaces the user's list, and rejects a built optimizer. TensorFlow
        # must not track the attribute: the children of an optimizer in a checkpoint must not change.
        excluded = [inner._var_key(v) for v, own in names if _matches(own, exclude)]
        earlier = getattr(inner, "_exclude_from_weight_decay", [])
        value = list(dict.fromkeys([*earlier, *excluded]))
        object.__setattr__(inner, "_exclude_from_weight_decay", value)
    factors = [(v, _group_of(own, groups).get("learning_rate_scale")) for v, own in names]
    # No assignment expression, because AutoGraph would warn of it: `minimize` calls this in a trace.
    scales = {inner._var_key(variable): factor for variable, factor in factors if factor}
    if hasattr(inner, "_ctl_scales"):
        inner._ctl_scales.update(scales)
    elif scales:
        # The user and checkpoints know this object, so it cannot be wrapped.
        classes.extend(inner, _Scaled)
        inner._ctl_scales = inner._no_dependency(scales)


class _Scaled(tf_keras.optimizers.Optimizer):
    """Multiplies the learning rate of an optimizer by a factor while it updates a variable.

    `_ctl_scales` has the factors by the optimizer's keys of variables; the others have the factor 1.
    """

    _ctl_scale: float | None = None  # the factor of the variable that is being updated
    _ctl_scales: dict[Any, float]

    @property
    def learning_rate(self) -> Any:
        rate = super().learning_rate
        return rate if self._ctl_scale is None else rate * self._ctl_scale

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        super(_Scaled, type(self)).learning_rate.fset(self, rate)

    def _apply_weight_decay(self, variables: Sequence[tf.Variable]) -> None:
        """Does nothing: `update_step` decays the variable just before its update instead."""

    def update_step(self, gradient: Any, variable: tf.Variable) -> None:
        # A copy that was made from the config has none.
        self._ctl_scale = vars(self).get("_ctl_scales", {}).get(self._var_key(variable))
        try:
            # The base class decays all variables with one rate.
            if self.weight_decay is not None and self._use_weight_decay(variable):
                rate = tf.cast(self.learning_rate, variable.dtype)
                decay = tf.cast(self.weight_decay, variable.dtype)
                variable.assign_sub(variable * decay * rate)
            super().update_step(gradient, variable)
        finally:
            self._ctl_scale = None


def _names(models: Models) -> _Names:
    """Returns each variable with its names: its own, and the path of layers that lead to it.

    The variables of a model inside of a model are named without the inner model: "conv/kernel", but
    its path is "backbone/conv/kernel". For a model other than `trainer.model`, the path begins with the
    name of its attribute: "discriminator/conv/kernel".
    """
    names: dict[int, tuple[tf.Variable, tuple[str, ...]]] = {}
    for prefix, model in models.items():
        if not model.built:
            continue
        attribute = f"{prefix.partition('/')[0]}/" if prefix else ""
        paths = {id(variable): path for variable, path in _paths(model, "")}
        for variable in variables_of(model):
            own = variable.name.partition(":")[0]
            path = paths.get(id(variable), own)
            _, earlier = names.get(id(variable), (None, ()))
            every = (*earlier, own, path, f"{attribute}{path}")
            names[id(variable)] = variable, tuple(dict.fromkeys(every))
    return list(names.values())


def _paths(layer: Any, prefix: str) -> Iterator[tuple[tf.Variable, str]]:
    for variable in variables_of(layer):
        yield variable, prefix + variable.name.partition(":")[0].rpartition("/")[-1]
    for inner in layer._flatten_layers(recursive=False, include_self=False):
        yield from _paths(inner, f"{prefix}{inner.name}/")


def _group_of(names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the first group that contains the variable."""
    return next((group for group in groups if _matches(names, patterns(group))), {})


def _matches(names: Sequence[str], wanted: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in wanted)
