"""Renders the API reference from the docstrings, which griffe reads without importing TensorFlow."""

from collections.abc import Callable, Iterator
import functools
import pathlib

import griffe

_ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = ("ctl", "ctl.data", "ctl.random", "ctl.ray", "ctl.replica", "ctl.testing")
# The public methods that StandardTrainer inherits, next to its own.
_INHERITED = {
    "ctl.StandardTrainer": ["minimize", "train_step", "train", "train_loop_begin", "train_loop_end",
                            "build_scope", "compute_dtype", "variable_dtype", "averaged_weights"],
}  # fmt: skip


@functools.cache
def _package() -> griffe.Module:
    package = griffe.load("ctl", search_paths=[_ROOT], docstring_parser="google")
    assert isinstance(package, griffe.Module)
    return package


def public_names(module: str) -> list[str]:
    """Returns the full names of the public classes and functions of a module, without submodules."""
    members = _package().modules_collection[module].members
    exported = _package().modules_collection[module].exports
    names = exported or [
        name
        for name, member in members.items()
        if not name.startswith("_") and not member.is_alias and member.is_function
    ]
    full_names = [f"{module}.{name}" for name in names]
    return [name for name in full_names if name not in MODULES]


def renderer(module: str) -> Callable[[], str]:
    """Returns a function that renders the page of a module."""
    if not _package().modules_collection[module].exports:  # its docstring describes all functions
        return lambda: _directive(module, show_root_heading=False, show_root_toc_entry=False)
    return lambda: "\n\n".join(_directive(name) for name in public_names(module))


def _directive(name: str, **options: bool | list[str]) -> str:
    if name in _INHERITED:
        options["inherited_members"] = _INHERITED[name]
    lines = [f"      {key}: {str(value).lower()}" for key, value in options.items()]
    return "\n".join([f"::: {name}", *(["    options:", *lines] if lines else [])])


def render_index() -> str:
    """Returns a table of all public names with the first sentence of their docstrings."""
    lines = []
    for module in MODULES:
        lines += ["", f"## {module}", "", "| name | purpose |", "|---|---|"]
        for name in public_names(module):
            lines.append(f"| [`{name}`][{name}] | {_summary(name)} |")
    return "\n".join(lines)


def missing_docstrings() -> Iterator[str]:
    """Yields a line for each public name, or method of a public class, without a docstring."""
    for name in (name for module in MODULES for name in public_names(module)):
        target = _resolve(name)
        methods = target.members.values() if target.is_class else ()
        for item in (target, *methods):
            if item.name.startswith("_") or item.is_attribute or item.is_alias:
                continue
            if not item.docstring:
                yield f"{name}: {item.path} has no docstring."


def _resolve(name: str) -> griffe.Object:
    item = _package().modules_collection[name]
    return item.final_target if isinstance(item, griffe.Alias) else item


def _summary(name: str) -> str:
    docstring = _resolve(name).docstring
    text = docstring.value.partition("\n\n")[0] if docstring else ""
    return " ".join(text.split()).replace("|", "\\|")
