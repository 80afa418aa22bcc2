"""Describes a key, a flag or an argument that does not exist; opened by name for such a mistake."""

from collections.abc import Iterable, Mapping
import pathlib
import re
from typing import Any

from ml_collections import config_dict

from ctl import errors
from ctl.configs import flags, keys
from ctl.configs.modes import MODES

# Flag of an earlier version, or of other libraries -> what to do instead.
_INSTEAD = {
    "overfit": "run ctl check CONFIG --checks=overfit",
    "find_batch": "on a GPU or a CPU, run ctl find_batch CONFIG",
    "resume": "the same command resumes the run in its workdir",
}


def describe_key(path: str, key: Any, section: Any, is_new: bool = False) -> str:
    """Describes a key that does not exist.

    Args:
        path: the full name of the section; "" for the config itself.
        key: the key.
        section: the values of the section.
        is_new: whether a value was assigned to the key in Python.
    """
    name = f"{path}.{key}".lstrip(".")
    if not isinstance(section, Mapping | config_dict.ConfigDict):
        return f"There is no config key {name}: {path} is a value, not a section."
    if name in keys.RENAMED:
        return f"There is no config key {name}: it is now {keys.RENAMED[name]}."
    if name in keys.REMOVED:
        return f"There is no config key {name} any more: {keys.REMOVED[name]}."
    known = {str(k): f"{path}.{k}".lstrip(".") for k in section}
    if path.split(".")[0] == "model":  # any keys that the experiment sets
        hint = errors.did_you_mean(str(key), known) or ": this experiment sets no keys there."
        if is_new and not errors.closest(str(key), known):
            change = f"{key}=..."
            for part in reversed(path.split(".")):
                change = f"{part}=dict({change})"
            hint = f": the config is locked, so add the key in ctl.config({change})."
    else:
        hint = errors.did_you_mean(str(key), known, _full_names())
    return f"There is no config key {name}{hint}"


def _full_names() -> dict[str, str]:
    """Returns last part of a name, or another name -> the full names of the keys that it means."""
    full_names: dict[str, dict[str, None]] = {}  # the inner mapping is an ordered set
    for key in keys.flatten(keys.defaults()):
        parts = key.split(".")
        for end in range(2, len(parts) + 1):
            full_names.setdefault(parts[end - 1], {})[".".join(parts[:end])] = None
    for each in keys.KEYS:
        for other in each.also:
            shown = f'{each.name} in epochs, such as "90 epochs"' if "epoch" in other else each.name
            full_names.setdefault(other.replace(" ", "_"), {})[shown] = None
    return {last: " or ".join(names) for last, names in full_names.items()}


def describe_flag(name: str, argument: str = "") -> str:
    """Describes a flag that does not exist; the argument may be "--NAME=VALUE"."""
    if name in _INSTEAD:
        return f"There is no flag --{name}: {_INSTEAD[name]}."
    return f"There is no flag --{name}{_suggest(name, number=argument.partition('=')[2])}"


def _suggest(name: str, value: str = "", number: str = "") -> str:
    """Returns the end of a message about an unknown name of a flag or a key.

    Args:
        name: the unknown name.
        value: "=VALUE", which the suggested key gets.
        number: VALUE, which only a suggested number of epochs gets.
    """
    known = {} if value else {flag: f"--{flag}" for flag in (*flags.VALUES, *flags.SWITCHES)}
    names = keys.flatten(keys.defaults())
    full_names = {key: f"--config.{key}{value}" for key in names}
    last_parts = {key.rpartition(".")[-1]: f"--config.{key}{value}" for key in reversed(names)}
    epochs = f'="{number or value[1:] or 90} epochs"'
    others = {n: f"--config.{k.name}" for k in reversed(keys.KEYS) for n in k.also}
    others = {n: key + (epochs if "epoch" in n else value) for n, key in others.items()}
    return errors.did_you_mean(name, known, full_names, last_parts, others)


def describe_argument(argument: str, commands: Iterable[str]) -> str:
    """Describes an argument that is neither a flag, nor the first config file, nor the first mode."""
    if re.search(r"\.py(:|$)", argument):
        return flags.TWO_CONFIGS
    if argument in MODES:
        return f"Two modes are given: remove {argument!r}."
    name, equals, value = argument.partition("=")
    if name in keys.flatten(keys.defaults()):
        return f"{argument!r} is not a flag: write --config.{argument}."
    if equals:
        hint = _suggest(name, equals + value) or ": write --config.KEY=VALUE."
        return f"{argument!r} is not a flag{hint}"
    if argument in commands:
        return f"The command {argument} must be the first argument: ctl {argument} ..."
    path = pathlib.Path(argument)
    if path.is_dir():
        return f"{argument!r} is a folder: name the config file, and --workdir={argument}."
    names = {name: name for name in (*MODES, *commands)}
    files = {each.stem: str(each) for each in sorted(path.parent.glob("*.py"))}
    similar = errors.closest(path.name, files | names)
    hint = f"did you mean {similar}?" if similar else "see ctl --help."
    return f"{argument!r} is no mode, no command and no config file, which ends in .py: {hint}"
