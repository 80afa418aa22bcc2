"""Reads the value of `optimizer.groups`, which `ctl.parts.config` checks."""

from collections.abc import Iterable, Mapping
from typing import Any

from ctl.configs import keys


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
        filled = {name: given.get(name, default[name]) for name in _fields()}
        return {**group, "optimizer": filled}

    return [fill(group) for group in groups]


def _fields() -> list[str]:
    return [key.name.removeprefix("optimizer.") for key in keys.KEYS if key.grouped]
