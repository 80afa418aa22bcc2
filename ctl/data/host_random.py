"""Detects numbers that Python's and numpy's generators draw while TensorFlow traces a function.

Such a number is drawn once, and is a constant of the graph: all examples get the same.
"""

from collections.abc import Iterator, Sequence
import contextlib
import inspect
import pickle
import random
import threading
import types
from typing import Any

import numpy as np

from ctl.configs.error_location import user_frame
from ctl.errors import UsageError
from ctl.hardware import file_systems

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_PYTHON = "Python's random"
_THREAD = threading.local()


@contextlib.contextmanager
def watch(generators: Sequence[tuple[str, Any]]) -> Iterator[list[str]]:
    """Yields a list that has, after the `with` block, the names of the generators that were used.

    Args:
        generators: the names and the generators to watch in addition to the global ones.
    """
    changed: list[str] = []
    before, calls = _states(generators), file_systems.calls()
    yield changed
    after = _states(generators)
    changed += [new[0] for old, new in zip(before, after, strict=True) if old != new]
    # A client of an object store may have drawn it in another thread.
    if changed and changed[0] == _PYTHON and (calls[1] or file_systems.calls()[0] != calls[0]):
        changed.remove(_PYTHON)


def _states(generators: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [
        (_PYTHON, random.getstate()),
        ("numpy.random", pickle.dumps(np.random.get_state())),
        *((name, pickle.dumps(generator)) for name, generator in generators),
    ]


def referenced(function: types.FunctionType, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the generators that a user's function refers to, directly or in functions it calls."""
    if function in seen or _is_library(function.__module__):
        return
    seen.add(function)
    try:
        names = inspect.getclosurevars(function)
    except ValueError:  # a variable of the enclosing function that is not yet assigned
        return
    for name, value in {**names.globals, **names.nonlocals}.items():
        if isinstance(value, GENERATORS):
            yield name, value
        elif isinstance(value, types.FunctionType):
            yield from referenced(value, seen)


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("ctl", "orbit", "tensorflow", "tf_keras", "numpy")


@contextlib.contextmanager
def check(function: Any) -> Iterator[None]:
    """Checks that a user's function of examples draws nothing while the `with` block traces it.

    Args:
        function: the function, which tf.data calls once with symbolic tensors.

    Raises:
        UsageError: the function drew numbers. The message names it, with its file and line.
    """
    function = getattr(function, "__func__", function)
    if _is_library(getattr(function, "__module__", None)):
        yield
        return
    is_function = isinstance(function, types.FunctionType)
    with watch(list(referenced(function, set())) if is_function else []) as changed:
        yield
    if changed:
        name, place = getattr(function, "__name__", type(function).__name__), None
        if is_function:
            place = user_frame([(function.__code__.co_filename, function.__code__.co_firstlineno)])
        raise UsageError(
            f"{f'{place}: ' if place else ''}{name} draws from {changed[0]}, which happens once, while "
            "tf.data traces it, so all examples get the same number: use tf.random.stateless_* with "
            "the seed that ctl.data.augmented passes to its function, or draw it outside."
        )


@contextlib.contextmanager
def checked_maps() -> Iterator[None]:
    """Checks the functions of the datasets that the code inside the `with` block makes."""
    outer, _THREAD.checks = getattr(_THREAD, "checks", False), True
    try:
        yield
    finally:
        _THREAD.checks = outer


def check_map(original: Any, wrapper: Any, func: Any, *args: Any, **kwargs: Any) -> None:
    """Runs the constructor of tf.data that traces the function of a map, filter or interleave."""
    enabled = getattr(_THREAD, "checks", False)
    with check(func) if enabled else contextlib.nullcontext():
        original(wrapper, func, *args, **kwargs)
