"""The reference of the config keys: their types, defaults and meaning, read from defaults.py."""

import ast
from collections.abc import Iterator
import dataclasses
import functools
import inspect
import textwrap

from ctl.configs import defaults, durations, overrides

_TYPE_NAMES = {bool: "boolean", float: "number", int: "integer", list: "list", str: "string"}


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """A key of an experiment's config.

    Attributes:
        name: its full name, such as "train.steps".
        type: boolean, integer, number, string, list, "duration" (steps, or a text with a unit), or
            "free section", whose keys the experiment chooses.
        default: the Python literal of its default.
        text: what it means, as the comment in defaults.py says.
    """

    name: str
    type: str
    default: str
    text: str


@functools.cache
def config_keys() -> tuple[ConfigKey, ...]:
    """Returns all keys, in the order of defaults.py.

    The sections whose keys the experiment chooses are not in it; see `free_sections`.
    """
    values = overrides.flatten(defaults.defaults())
    texts = dict(key_texts())
    return tuple(
        ConfigKey(name, _type_name(name, value), repr(value), texts[name])
        for name, value in values.items()
    )


def free_sections() -> tuple[ConfigKey, ...]:
    """Returns the sections whose keys the experiment chooses, in the order of defaults.py."""
    return tuple(
        ConfigKey(name, "free section", "{}", text)
        for name, text in key_texts()
        if name in defaults.FREE_SECTIONS
    )


def _type_name(name: str, value: object) -> str:
    return "duration" if name in durations.KEYS else _TYPE_NAMES[type(value)]


def key_texts() -> Iterator[tuple[str, str]]:
    """Yields the full name of each key and section, and the text of its comments.

    A comment is above the line of its key, or at the end of it.
    """
    lines = textwrap.dedent(inspect.getsource(defaults.defaults)).splitlines()
    paths = {"config": ""}  # name of a variable of the function -> full name of its section
    for statement in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(statement, ast.Assign) or not isinstance(target, ast.Attribute):
            continue
        assert isinstance(target.value, ast.Name)
        name = f"{paths[target.value.id]}.{target.attr}".lstrip(".")
        for alias in statement.targets[1:]:
            assert isinstance(alias, ast.Name)
            paths[alias.id] = name
        above: list[str] = []
        for line in reversed(lines[: statement.lineno - 1]):
            if not line.strip().startswith("#"):
                break
            above.insert(0, line.strip(" #"))
        assert statement.end_lineno is not None
        _, _, behind = lines[statement.end_lineno - 1].partition("  # ")
        yield name, " ".join([*above, behind]).strip()
