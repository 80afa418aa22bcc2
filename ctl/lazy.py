"""Imports the public names of a package when they are first used (PEP 562)."""

from collections.abc import Callable, Mapping
import importlib
import sys
from typing import Any


def attach(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns the `__getattr__`, `__dir__` and `__all__` of a package.

        __getattr__, __dir__, __all__ = lazy.attach(__name__, {"cache": "cached"})

    A block `if TYPE_CHECKING` imports the names for editors and type checkers, each `as` itself, which
    marks it as public.

    Args:
        package: the name of the package.
        modules: module of the package -> its public names, separated by spaces.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{places[name]}"), name)

    def list_names() -> list[str]:
        names = vars(sys.modules[package])
        return sorted({*names, *names["__all__"]})

    return find, list_names, sorted(places)
