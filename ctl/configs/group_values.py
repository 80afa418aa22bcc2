"""Checks and reads the values of `optimizer.groups` and `optimizer.weight_decay_exclude`."""

from collections.abc import Iterable, Mapping
import math
from typing import Any

from ctl.configs import durations, keys
from ctl.errors import UsageError, did_you_mean

_FIELDS = ("variables", "learning_rate_scale", "frozen", "frozen_until", "optimizer")
# The keys of the section `optimizer` that an optimizer of a group may have; the others are for all.
OPTIMIZER_FIELDS = (
    "name", "arguments", "learning_rate", "learning_rate_batch_size", "schedule",
    "schedule_arguments", "warmup_steps", "decay_steps", "momentum", "weight_decay",
)  # fmt: skip
_EXAMPLE = 'dict(variables="backbone/*", learning_rate_scale=0.1)'


def check(values: Mapping[str, Any]) -> None:
    """Raises UsageError if a value of the two keys is wrong.

    Args:
        values: full names of keys -> values.
    """
    for pattern in values.get("optimizer.weight_decay_exclude", ()):
        _check_pattern("optimizer.weight_decay_exclude", pattern)
    for index, group in enumerate(values.get("optimizer.groups", ())):
        _check_group(f"optimizer.groups[{index}]", group)


def patterns(group: Mapping[str, Any]) -> list[str]:
    """Returns the patterns of a checked group."""
    names = group["variables"]
    return [names] if isinstance(names, str) else list(names)


def without(groups: Iterable[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Returns checked groups without `frozen_until`, once its steps have passed, or `optimizer`."""
    result = []
    for group in groups:
        fields = dict(group)
        # The group keeps a field, because the first group that matches a variable counts.
        if fields.pop(name, None):
            fields.setdefault("learning_rate_scale", 1.0)
        result.append(fields)
    return result


def complete(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns checked groups with every key of their optimizers, the others at their defaults."""
    default = keys.defaults().optimizer.to_dict()

    def fill(group: Any) -> Any:
        given = group.get("optimizer") if isinstance(group, Mapping) else None
        if not isinstance(given, Mapping):
            return group
        filled = {name: given.get(name, default[name]) for name in OPTIMIZER_FIELDS}
        return {**group, "optimizer": filled}

    return [fill(group) for group in groups]


def _check_group(name: str, group: Any) -> None:
    if not isinstance(group, Mapping):
        raise UsageError(f"{name} is {group!r}, but must be a section such as {_EXAMPLE}.")
    for key in group:
        if key not in _FIELDS:
            raise UsageError(f"{name} has the key {key!r}{did_you_mean(str(key), _FIELDS)}")
    if "variables" not in group:
        raise UsageError(f"{name} has no variables: name them by a pattern, such as {_EXAMPLE}.")
    if not isinstance(group["variables"], str | list | tuple):
        raise UsageError(
            f"{name}.variables is {group['variables']!r}, but must be a pattern or a list of them."
        )
    for pattern in patterns(group):
        _check_pattern(f"{name}.variables", pattern)
    frozen, scale = group.get("frozen", False), group.get("learning_rate_scale")
    if not isinstance(frozen, bool):
        raise UsageError(f"{name}.frozen is {frozen!r}, but must be true or false.")
    until, optimizer = group.get("frozen_until"), group.get("optimizer")
    if frozen == any(value is not None for value in (scale, until, optimizer)):
        raise UsageError(
            f"{name} requires either frozen=True, or learning_rate_scale, frozen_until or optimizer: "
            "set one of them."
        )
    for key in optimizer if isinstance(optimizer, Mapping) else ():
        if key not in OPTIMIZER_FIELDS:
            raise UsageError(
                f"{name}.optimizer has the key {key!r}{did_you_mean(str(key), OPTIMIZER_FIELDS)}"
            )
    is_optimizer = callable(optimizer) or hasattr(optimizer, "apply_gradients")
    if optimizer is not None and not (is_optimizer or isinstance(optimizer, Mapping)):
        raise UsageError(
            f"{name}.optimizer is {optimizer!r}, but must be a section such as dict(name='adam', "
            "learning_rate=1e-3); in a script, a tf_keras optimizer or a function that makes one."
        )
    if until is not None:
        _check_step(f"{name}.frozen_until", until)
    if scale is None:
        return
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not math.isfinite(scale) or scale <= 0:
        raise UsageError(
            f"{name}.learning_rate_scale is {scale!r}, but must be a finite number greater than 0."
        )


def _check_step(name: str, value: Any) -> None:
    if isinstance(value, str):
        durations.check(name, value)
    elif isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise UsageError(
            f"{name} is {value!r}, but must be a number of steps from 1 to 2147483647, or a text "
            'such as "2 epochs".'
        )


def _check_pattern(name: str, pattern: Any) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise UsageError(
            f'{name} contains {pattern!r}, but must contain patterns such as "*/bias".'
        )
