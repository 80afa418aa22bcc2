"""Checks a complete config, before anything is built.

The components of ctl declare the values of their keys and the rules about them. This module checks the
structure of a config.
"""

from collections.abc import Mapping
import functools
import math
import operator
from typing import Any

from ml_collections import config_dict

from ctl import errors
from ctl.configs import keys, overrides
from ctl.configs.component import MAX_DIGITS, format_integer
from ctl.errors import UsageError

_MAX_DEPTH = 50  # of nested sections and lists; far below Python's recursion limit


def check_config(config: Any) -> None:
    """Checks a complete config.

    Args:
        config: the result of an experiment's `get_config`, with the changes of the command line.

    Raises:
        UsageError: something is wrong; the message is one line that says what, and how to fix it.
    """
    if not isinstance(config, config_dict.ConfigDict):
        raise UsageError(
            f"get_config returned {errors.type_name(config)}: return the result of ctl.config(...)."
        )
    try:
        _check_keys(config)
        values = overrides.flatten(config)
    except RecursionError:
        raise UsageError(
            "The config has a section or a list that contains itself, or too many nested ones: use "
            "plain ones."
        ) from None
    keys.check_values(values)
    for section in keys.FREE_SECTIONS:
        value = functools.reduce(operator.getitem, section.split("."), config)
        _check_model(value, section, sections=(dict, config_dict.ConfigDict))
    _check_model(config.actions, "actions", sections=(dict,))
    _check_group_optimizers(config)
    keys.check_rules(values)
    for name, value in values.items():
        errors.check_credentials(name, str(value))


def _check_keys(config: config_dict.ConfigDict) -> None:
    """Checks that the config has every key, no others, and values of the right types."""
    overrides.config(**dict(config.items()))
    values = overrides.flatten(config)
    for name in overrides.flatten(keys.defaults()):
        if name not in values:
            raise UsageError(
                f"The config has no {name}: let get_config start from ctl.config(...), which sets "
                "every key, and change its keys one by one."
            )
    for name in keys.FREE_SECTIONS:  # `flatten` does not show an empty one
        section: Any = config
        for part in name.split("."):
            section = section.get(part)
        if not isinstance(section, config_dict.ConfigDict):
            raise UsageError(
                f"The config has no section {name}: set its keys by config.{name}.KEY = VALUE."
            )


def _check_model(value: Any, name: str, *, sections: Any, depth: int = 0) -> None:
    """Checks that the experiment's own keys can be written to config.json, read and compared.

    Args:
        value: the value of a key, or a part of it.
        name: its full name.
        sections: the types that a section may have at this place.
        depth: the number of sections and lists around it.
    """
    if depth > _MAX_DEPTH:
        raise UsageError(
            f"{name[:40]}... has more than {_MAX_DEPTH} nested sections or lists, or contains itself: "
            "use fewer."
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} is {value}, but must be a finite number.")
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise UsageError(f"{name} is {format_integer(value)}, but must have at most {MAX_DIGITS}.")
    if isinstance(value, sections):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{name} has the key {key!r}, but its keys must be strings.")
            _check_model(value[key], f"{name}.{key}", sections=sections, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for index, element in enumerate(value):
            # ConfigDict.to_dict() does not convert a ConfigDict in a list.
            _check_model(element, f"{name}[{index}]", sections=(dict,), depth=depth + 1)
    elif not isinstance(value, bool | int | float | str | None):
        shown = errors.show_value(value) if callable(value) else errors.type_name(value)
        raise UsageError(
            f"{name} is {shown}, but the workdir can store only numbers, strings, "
            "booleans, None, and lists and sections of these."
        )


def _check_group_optimizers(config: config_dict.ConfigDict) -> None:
    """Checks each optimizer of `optimizer.groups` as if it were that of the config."""
    for index, group in enumerate(config.optimizer.groups):
        if group.get("optimizer") is None:
            continue
        name = f"optimizer.groups[{index}].optimizer"
        if not isinstance(group["optimizer"], Mapping):
            raise UsageError(
                f"{name} is {errors.type_name(group['optimizer'])}, but must be a section such as "
                "dict(name='adam', learning_rate=1e-3)."
            )
        _check_model(group["optimizer"], name, sections=(dict,))
        section = {**group["optimizer"], "shard_state": config.optimizer.shard_state}
        try:
            other = overrides.config(train=dict(steps=config.train.steps), optimizer=section)
            values = overrides.flatten({"optimizer": other.optimizer, "train": other.train})
            keys.check_values(values)
            keys.check_rules(values)
        except UsageError as error:
            raise UsageError(f"In {name}: {error}") from None
