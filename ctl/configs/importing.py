"""Imports Python files of the user by their paths."""

from collections.abc import Iterator
import contextlib
import importlib.util
import pathlib
import sys
from types import ModuleType

_modules: dict[tuple[str, int, int], ModuleType] = {}  # by path, time of change and size


def import_file(file: pathlib.Path) -> ModuleType:
    """Imports a file as a module, once even if it holds both the config and the trainer."""
    path = file.resolve()
    state = (str(path), path.stat().st_mtime_ns, path.stat().st_size)
    if state in _modules:
        return _modules[state]
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with importable(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _modules[state] = module
    return module


def _module_name(path: pathlib.Path) -> str:
    """Returns a name that is unique in sys.modules: several files may have the same name."""
    name = stem = f"ctl_experiment_{path.stem}"
    number = 1
    while name in sys.modules and sys.modules[name].__file__ != str(path):
        number += 1
        name = f"{stem}_{number}"
    return name


@contextlib.contextmanager
def importable(folder: pathlib.Path) -> Iterator[None]:
    """Makes the other modules of an experiment's folder importable within the `with` block."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)
