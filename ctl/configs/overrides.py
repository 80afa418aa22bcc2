"""Sets, parses and explains the keys of an experiment's config. Loads no TensorFlow."""

import ast
from collections.abc import Callable, Mapping
import re
from types import NoneType
from typing import Any

from ml_collections import config_dict

from ctl import errors
from ctl.configs.defaults import defaults
from ctl.errors import UsageError


def config(**changes: Any) -> config_dict.ConfigDict:
    """An experiment's config: the defaults, and what the experiment changes.

        def get_config():
            return ctl.config(trainer="my_model.py:MyTrainer", data=dict(global_batch_size=64))

    Args:
        **changes: sections as mappings, or top-level keys. `model` takes any keys: they are the
            ones that the trainer reads.

    Returns:
        A locked `ConfigDict`; change its values, not its keys.

    Raises:
        UsageError: a key is unknown, or a value has the wrong type.
    """
    result = defaults()
    model = changes.pop("model", None)
    for key, value in _section("model", {} if model is None else model).items():
        result.model[key] = value
    _change_section(result, changes, "")
    return result.lock()


def change(config: config_dict.ConfigDict, name: str, text: str | None) -> None:
    """Changes a key as the command line says: --config.NAME=TEXT.

    Args:
        config: an experiment's config.
        name: the key's full name.
        text: its new value; None where the command line has just the name, which means true.

    Raises:
        UsageError: there is no such key, or the text is not a value for it.
    """
    section: Any = config
    *path, last = name.split(".")
    for depth, part in enumerate([*path, last]):
        if not _is_section(section) or part not in section:
            raise UsageError(_unknown(".".join(path[:depth]), part, section))
        holder, section = section, section[part]
    holder[last] = _from_text(name, text, holder[last])


def explain(error: BaseException) -> str | None:
    """Says as ctl does what ml_collections means when it refuses to read or set a config's key.

    Returns:
        What is wrong, or None where the error is of another kind.
    """
    nested = error.args[0] if error.args else None
    by_attribute = isinstance(error, AttributeError) and isinstance(nested, KeyError)
    inner = nested if by_attribute else error  # config.key raises an AttributeError of a KeyError
    text = inner.args[0] if isinstance(inner, Exception) and inner.args else None
    if not isinstance(text, str):
        return None
    unknown = _LOCKED.match(text) or (_ABSENT.match(text) if by_attribute else None)
    if unknown:
        return _unknown("", unknown[1], defaults())
    mistyped = _MISTYPED.match(text)
    if mistyped:
        key, value, kind, want = mistyped.groups()
        words = {known.__name__: word for known, word in _WORDS.items()}
        shown = {"str": repr(value), "ConfigDict": "a section"}.get(kind, value)
        return f"{key} is {shown}, want {words.get(want, 'a section')}."
    return None


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The values of a config by their full names, such as "train.steps"."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if _is_section(value):
            result |= flat(value, f"{path}{key}.")
        else:
            result[f"{path}{key}"] = value
    return result


def _change_section(section: config_dict.ConfigDict, changes: Mapping[str, Any], path: str) -> None:
    for key, value in changes.items():
        name = _join(path, key)
        if key not in section:
            raise UsageError(_unknown(path, key, section))
        if _is_section(section[key]):
            _change_section(section[key], _section(name, value), name)
        else:
            section[key] = _typed(name, value, section[key])


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping | config_dict.ConfigDict)


def _section(name: str, value: Any) -> Mapping[str, Any]:
    if not _is_section(value):
        last = name.rpartition(".")[-1]
        raise UsageError(f"{name} is {shown(value)}, want a section: {last}=dict(...).")
    section: Mapping[str, Any] = value
    return section


def _typed(name: str, value: Any, default: Any) -> Any:
    """The value, if it is of its default's type; a whole number will do for a number."""
    want = type(default)
    if want is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is not want:
        given = "a section" if _is_section(value) else shown(value)
        raise UsageError(f"{name} is {given}, want {_WORDS[want]}.")
    return value


def shown(value: Any) -> str:
    """A value as messages show it."""
    try:
        return repr(value)
    except Exception:  # a list in itself, a number of thousands of digits, somebody's own class
        return errors.type_name(value)


def _from_text(name: str, text: str | None, default: Any) -> Any:
    """What a text of the command line means for a key, by the type of its default."""
    if _is_section(default):
        example = next(iter(flat(default, f"{name}.")), f"{name}.KEY")
        raise UsageError(f"{name} is a section: change a key of it, --config.{example}=VALUE.")
    if text is None and isinstance(default, bool):
        return True
    if text is None:
        raise UsageError(f"--config.{name} has no value: write --config.{name}=VALUE.")
    kind = type(default)
    try:
        return _PARSERS[kind](text)
    except (KeyError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        want = _WORDS.get(kind, f"a {kind.__name__}, which the command line cannot give")
        raise UsageError(f"{name} is {text!r}, want {want}.") from None


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return text


_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: _boolean,
    float: float,
    int: int,
    list: lambda text: list(ast.literal_eval(text)),
    NoneType: _literal,
    str: str,
    tuple: lambda text: tuple(ast.literal_eval(text)),
}
# What ml_collections says; another version may say it otherwise, and is then passed on as it is.
_LOCKED = re.compile(r'Key "(\w+)" does not exist and cannot be added')
_ABSENT = re.compile(r"'(\w+)'")
_MISTYPED = re.compile(
    r"Could not override field '(\w+)' \(reference\)\. (.*) is of original type "
    r"<class '(?:\w+\.)*(\w+)'> and cannot be casted to type <class '(?:\w+\.)*(\w+)'>",
    re.DOTALL,
)
_WORDS = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    list: "a list, such as [1, 2]",
    str: "a string",
    tuple: "a tuple, such as (1, 2)",
}


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}".lstrip(".")


def _unknown(path: str, key: Any, section: Any) -> str:
    name = _join(path, key)
    if not _is_section(section):
        return f"There is no config key {name}: {path} is a value, not a section."
    known = {str(k): _join(path, k) for k in section}
    if path.split(".")[0] == "model":  # the experiment's own
        hint = errors.did_you_mean(str(key), known) or ": this experiment sets none there."
    else:
        hint = errors.did_you_mean(str(key), known, _full_names())
    return f"There is no config key {name}{hint}"


def _full_names() -> dict[str, str]:
    """Last part of a name -> the full names that end in it, of keys and of sections."""
    found: dict[str, list[str]] = {}
    for full in flat(defaults()):
        parts = full.split(".")
        for end in range(2, len(parts) + 1):
            names = found.setdefault(parts[end - 1], [])
            if ".".join(parts[:end]) not in names:
                names.append(".".join(parts[:end]))
    return {last: " or ".join(names) for last, names in found.items()}
