"""The command line of a benchmark: one flag per name, whose default also says its type."""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any


def parse(
    description: str | None,
    arguments: Sequence[str] | None = None,
    choices: Mapping[str, Collection[str]] | None = None,
    **defaults: Any,
) -> argparse.Namespace:
    """Parses flags.

    Args:
        description: the docstring of the benchmark.
        arguments: the words of the command line; those of this process by default.
        choices: flag -> its possible values.
        **defaults: flag -> its default. A list takes several values, of which "none" is None. A
            function, such as `pathlib.Path`, converts a value that may be missing.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        limited = {"choices": choices[name]} if choices and name in choices else {}
        parser.add_argument(f"--{name}", **_options(default), **limited)
    return parser.parse_args(arguments)


def _options(default: Any) -> dict[str, Any]:
    if default is False:
        return {"action": "store_true"}
    if callable(default):
        return {"type": default}
    options = {"default": default, "help": "default %(default)s"}
    if isinstance(default, list):
        return {**options, "nargs": "+", "type": _value(type(default[0]))}
    return {**options, "type": type(default)}


def _value(kind: type) -> Callable[[str], Any]:
    return lambda text: None if text == "none" else kind(text)
