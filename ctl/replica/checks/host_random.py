"""Detects random numbers that Python draws while a step is traced, as constants of the graph."""

from collections.abc import Iterator
import contextlib
import inspect
import pickle
import random
import types
from typing import Any

import numpy as np
import tf_keras
from tf_keras.src import backend

from ctl.errors import UsageError

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


@contextlib.contextmanager
def check_host_random(trainer: Any) -> Iterator[None]:
    """Checks that the code inside the `with` block draws nothing from Python's and numpy's generators.

    It compares the states before and after: of the global generators, and of the generators that the
    methods of the trainer and of its layers can name.

    Args:
        trainer: the `StandardTrainer` whose step is traced inside.

    Raises:
        UsageError: the state of a generator changed. The message names it.
    """
    # Layers that are made in a step take their seeds from this generator. The threads of replicas have
    # none, so tf_keras would draw from Python's global one.
    if getattr(backend._SEED_GENERATOR, "generator", None) is None:
        backend._SEED_GENERATOR.generator = random.Random(0)
    generators = _find_generators(trainer)
    before = _states(generators)
    yield
    after = _states(generators)
    changed = [new[0] for old, new in zip(before, after, strict=True) if old != new]
    if changed:
        raise UsageError(
            f"The code of the step draws from {changed[0]}, which happens once, while the step is "
            "traced: use the functions of ctl.random, or accept it with allow_unkeyed_random=True "
            "(runtime.allow_unkeyed_random)."
        )


def _states(generators: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    states: list[tuple[str, Any]] = [
        ("Python's random", random.getstate()),
        ("numpy.random", pickle.dumps(np.random.get_state())),
    ]
    for name, generator in generators:
        state: Any
        if isinstance(generator, random.Random):
            state = generator.getstate()
        elif isinstance(generator, np.random.RandomState):
            state = pickle.dumps(generator.get_state())
        else:
            state = pickle.dumps(generator.bit_generator.state)
        states.append((name, state))
    return states


def _find_generators(trainer: Any) -> list[tuple[str, Any]]:
    """Returns the generators in attributes, and those that methods refer to, by their names."""
    generators: list[tuple[str, Any]] = []
    layers: dict[int, Any] = {}
    for name, value in _attributes(trainer):
        if isinstance(value, _GENERATORS):
            generators.append((f"self.{name}", value))
        elif isinstance(value, tf_keras.layers.Layer):
            layers |= {id(layer): layer for layer in value._flatten_layers()}
    for layer in layers.values():
        for name, value in _attributes(layer):
            if isinstance(value, _GENERATORS):
                generators.append((f"{layer.name}.{name}", value))
    seen: set[Any] = set()
    for cls in dict.fromkeys(type(owner) for owner in (trainer, *layers.values())):
        for base in cls.__mro__:
            for name, function in vars(base).items():
                # The numbers of a dataset are drawn while it is read.
                if isinstance(function, types.FunctionType) and name != "build_dataset":
                    generators += _referenced(function, seen)
    return generators


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        values = value.values() if isinstance(value, dict) else value
        yield from ((name, v) for v in (values if isinstance(value, list | dict) else [value]))


def _referenced(function: types.FunctionType, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the generators that a user's function refers to, directly or in functions it calls."""
    if function in seen or _is_library(function.__module__):
        return
    seen.add(function)
    names = inspect.getclosurevars(function)
    for name, value in {**names.globals, **names.nonlocals}.items():
        if isinstance(value, _GENERATORS):
            yield name, value
        elif isinstance(value, types.FunctionType):
            yield from _referenced(value, seen)


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("ctl", "orbit", "tensorflow", "tf_keras", "numpy")
