"""Checks and reads the values of `optimizer.groups` and `optimizer.weight_decay_exclude`."""

from collections.abc import Iterable, Mapping
import math
from typing import Any

from ctl.configs import durations
from ctl.errors import UsageError, did_you_mean

_FIELDS = ("variables", "learning_rate_scale", "frozen", "frozen_until")
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


def unfreeze(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns checked groups as they are once the steps of every `frozen_until` have passed."""
    result = []
    for group in groups:
        fields = dict(group)
        # The group keeps a field, because the first group that matches a variable counts.
        if fields.pop("frozen_until", None):
            fields.setdefault("learning_rate_scale", 1.0)
        result.append(fields)
    return result


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
    until = group.get("frozen_until")
    if frozen == (scale is not None or until is not None):
        raise UsageError(
            f"{name} requires either frozen=True, or learning_rate_scale or frozen_until: set one of "
            "them."
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
