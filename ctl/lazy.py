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

        lazy.attach(__name__, {".rows.gather": "all_gather"})           # of the package above
        lazy.attach(__name__, {"cache": "cached=memory"})               # under another name

    A block `if TYPE_CHECKING` imports the names for editors and type checkers, each `as` itself, which
    marks it as public.

    Args:
        package: the name of the package, or of a module.
        modules: module of the package -> its public names, separated by spaces.
    """
    places = {
        (public or name): (f".{module}", name)
        for module, names in modules.items()
        for name, _, public in (each.partition("=") for each in names.split())
    }

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = places[name]
        return getattr(importlib.import_module(module, package), attribute)

    def list_names() -> list[str]:
        names = vars(sys.modules[package])
        return sorted({*names, *names["__all__"]})

    return find, list_names, sorted(places)
