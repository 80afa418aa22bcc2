"""Sets the keys of an experiment's config, in Python or from the command line."""

import ast
from collections.abc import Callable, Mapping
import functools
import operator
from types import NoneType
from typing import Any

from ml_collections import config_dict

from ctl import errors
from ctl.configs import durations, loading
from ctl.configs.keys import FREE_SECTIONS, KEYS, defaults, flatten
from ctl.errors import UsageError

# The sections whose keys are new where the config file does not set them.
_ARGUMENTS = [name for name in FREE_SECTIONS if name != "model"]
_OPTIONAL = {key.name for key in KEYS if key.optional}
_MIXED = {key.name: key for key in KEYS if key.is_mixed}
_DURATIONS = {key.name for key in KEYS if key.duration}


def config(**changes: Any) -> config_dict.ConfigDict:
    """Returns an experiment's config: the defaults with the experiment's changes.

        def get_config():
            return ctl.config(trainer="my_model.py:MyTrainer", data=dict(global_batch_size=64))

    Args:
        **changes: top-level keys, or sections as mappings. The section `model`, which the trainer
            reads, and the sections with arguments of an optimizer or a schedule may have any keys.

    Returns:
        A locked `ConfigDict`: its values can be changed, but no keys can be added.

    Raises:
        UsageError: a key does not exist, or a value has the wrong type.
    """
    result = _as_config(defaults(), "")
    if changes.get("model", {}) is None:
        del changes["model"]
    _change_section(result, changes, "")
    return result.lock()


class _MissingConfigKeyError(UsageError, AttributeError):
    """A missing key; as an AttributeError it lets `getattr(config, key, default)` work."""


class _Config(config_dict.ConfigDict):
    """A config or a section of it, which knows its full name: its errors name the complete key."""

    def __init__(self, *arguments: Any, path: str = "", **options: Any):
        super().__init__(*arguments, **options)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, key: str) -> Any:
        try:
            return super().__getattr__(key)
        except AttributeError:
            if key.startswith("_"):
                raise
            raise _MissingConfigKeyError(_describe(self._path, key, self)) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        name = _join(self._path, key)
        if self.is_locked and key not in self:
            raise _MissingConfigKeyError(_describe(self._path, key, self, is_new=True))
        if _is_section(value):
            value = _as_config(value, name)
        try:
            super().__setitem__(key, value)
        except TypeError:
            raise _wrong_type(name, value, type(self[key])) from None


def _as_config(section: Any, path: str) -> Any:
    """Returns a section whose errors name the complete key; itself if it cannot have them."""
    if not all(isinstance(key, str) for key in section):
        return section
    result = _Config(path=path)
    is_config = isinstance(section, config_dict.ConfigDict)
    try:
        # The default of a duration is a reference without a type.
        for key, value in section.items(**{"preserve_field_references": True} if is_config else {}):
            result[key] = value
    except RecursionError:  # it contains itself
        return section
    return result


def with_values(
    config: config_dict.ConfigDict, values: Mapping[str, Any]
) -> config_dict.ConfigDict:
    """Returns a locked copy of a config with other values, by the full names of their keys."""
    copy = config_dict.ConfigDict(config.to_dict())
    with copy.ignore_type():
        for name, value in values.items():
            *path, last = name.split(".")
            functools.reduce(operator.getitem, path, copy)[last] = value
    return copy.lock()


def change(config: config_dict.ConfigDict, name: str, text: str | None) -> None:
    """Sets a key as the command line `--config.NAME=TEXT` requires.

    Args:
        config: an experiment's config; it is changed in place.
        name: the full name of the key.
        text: the new value; None for `--config.NAME` alone, which sets a boolean to true.

    Raises:
        UsageError: the key does not exist, or the text is not a value of the key's type.
    """
    section: Any = config
    *path, last = name.split(".")
    for depth, part in enumerate([*path, last]):
        # A key that the config file does not set is a new argument of the optimizer or schedule. The
        # keys of `model` are those that the experiment defines.
        is_argument = ".".join(path) in _ARGUMENTS or name in _OPTIONAL
        if part is last and is_argument and part not in section:
            with section.unlocked():
                section[part] = _literal(_required(name, text))
            return
        if not _is_section(section) or part not in section:
            raise UsageError(_describe(".".join(path[:depth]), part, section))
        holder, section = section, section[part]
    with holder.ignore_type():
        holder[last] = _from_text(name, text, holder[last])


def _change_section(section: config_dict.ConfigDict, changes: Mapping[str, Any], path: str) -> None:
    for key, value in changes.items():
        name = _join(path, key)
        if path in FREE_SECTIONS:
            section[key] = value
            continue
        if key not in section:
            raise UsageError(_describe(path, key, section))
        if not _is_section(section[key]):
            section[key] = _convert(name, value, section[key])
        elif _is_section(value):
            _change_section(section[key], value, name)
        else:
            shown = errors.show_value(value)
            raise UsageError(f"{name} is {shown}, but must be a section: {key}=dict(...).")


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping | config_dict.ConfigDict)


def _convert(name: str, value: Any, default: Any) -> Any:
    """Returns a value of the default's type; an integer is converted for a float, nothing else."""
    if name in _DURATIONS and isinstance(value, str):
        durations.check(name, value)
        return value
    if name in _MIXED and isinstance(value, bool | str):
        _MIXED[name].check(value)
        return value
    # A duration that the config file gives with a unit is a text here.
    expected = int if name in _DURATIONS else bool if name in _MIXED else type(default)
    if expected is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is not expected:
        raise _wrong_type(name, value, expected)
    return value


def _wrong_type(name: str, value: Any, expected: type) -> UsageError:
    shown = "a section" if _is_section(value) else errors.show_value(value)
    return UsageError(f"{name} is {shown}, but must be {_TYPE_NAMES.get(expected, 'a section')}.")


def _from_text(name: str, text: str | None, default: Any) -> Any:
    """Parses a text of the command line as a value of the default's type."""
    if _is_section(default):
        example = next(iter(flatten(default, f"{name}.")), f"{name}.KEY")
        raise UsageError(f"{name} is a section: set one of its keys, --config.{example}=VALUE.")
    if text is None and (isinstance(default, bool) or name in _MIXED):
        return True
    text = _required(name, text)
    if name in _MIXED:
        default = _MIXED[name].default
        if text.lower() not in _BOOLEANS:
            _MIXED[name].check(text)
            return text
    if name in _DURATIONS:
        return durations.from_text(name, text)
    expected = type(default)
    try:
        return _PARSERS[expected](text)
    except _PARSE_ERRORS:
        unsupported = f"a {expected.__name__}, which the command line does not support"
        type_name = _TYPE_NAMES.get(expected, unsupported)
        if isinstance(default, list | tuple) and default:
            type_name = f"a {expected.__name__}, such as {default}"
        raise UsageError(f"{name} is {text!r}, but must be {type_name}.") from None


def _required(name: str, text: str | None) -> str:
    if text is None:
        raise UsageError(f"--config.{name} has no value: write --config.{name}=VALUE.")
    return text


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except _PARSE_ERRORS:
        return text


def _sequence(text: str) -> list[Any] | tuple[Any, ...]:
    value = ast.literal_eval(text)
    if not isinstance(value, list | tuple):  # the letters of a text, the keys of a dict
        raise TypeError
    return value


# ast.literal_eval raises MemoryError and RecursionError for deeply nested text.
_PARSE_ERRORS = (KeyError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError)
_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: lambda text: _BOOLEANS[text.lower()],
    float: float,
    int: durations.parse_integer,
    list: lambda text: list(_sequence(text)),
    NoneType: _literal,
    str: str,
    tuple: lambda text: tuple(_sequence(text)),
}
_TYPE_NAMES = {
    bool: "true or false",
    float: "a number",
    int: "an integer",
    list: "a list, such as [1, 2]",
    str: "a string",
    tuple: "a tuple, such as (1, 2)",
}


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}".lstrip(".")


def _describe(path: str, key: Any, section: Any, *, is_new: bool = False) -> str:
    return loading.load("ctl.configs.unknown_names:describe_key")(path, key, section, is_new)
