"""Detects numbers that Python and numpy draw while a step is traced, as constants of the graph."""

from collections.abc import Iterator, Sequence
import contextlib
import random
import types
from typing import Any

import tf_keras

from ctl.built.attributes import Owner
from ctl.built.built_step import BuiltStep
from ctl.built.observers import Observer
from ctl.data import host_random
from ctl.errors import UsageError
from ctl.keras.private import backend
from ctl.rows.row_mask import Rows


class HostRandom(Observer):
    """Watches the generators of Python and numpy while a step is traced."""

    def __init__(self, step: BuiltStep):
        super().__init__(step)
        self._watch = contextlib.ExitStack()
        if not step.plan.options.allow_unkeyed_random:
            self._watch.enter_context(check_host_random(step.attributes.owner))

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Raises a UsageError if the code of the step drew from a generator."""
        self._watch.close()


@contextlib.contextmanager
def check_host_random(trainer: Owner) -> Iterator[None]:
    """Checks that the code inside the `with` block draws nothing from Python's and numpy's generators.

    It compares the states before and after: of the global generators, and of the generators that the
    methods of the trainer and of its layers can name.

    Args:
        trainer: the trainer or step whose step is traced inside.

    Raises:
        UsageError: the state of a generator changed. The message names it.
    """
    # Layers that are made in a step take their seeds from this generator. The threads of replicas have
    # none, so tf_keras would draw from Python's global one.
    if getattr(backend._SEED_GENERATOR, "generator", None) is None:
        backend._SEED_GENERATOR.generator = random.Random(0)
    generators = _find_generators(trainer)
    with host_random.watch(generators) as changed:
        yield
    if changed:
        raise UsageError(
            f"The code of the step draws from {changed[0]}, which happens once, while the step is "
            "traced: use the functions of ctl.random, or accept it with allow_unkeyed_random=True "
            "(runtime.allow_unkeyed_random)."
        )


def _find_generators(trainer: Owner) -> list[tuple[str, Any]]:
    """Returns the generators in attributes, and those that methods refer to, by their names."""
    generators: list[tuple[str, Any]] = []
    seen: set[Any] = set()
    layers: dict[int, Any] = {}
    for name, value in _attributes(trainer):
        if isinstance(value, host_random.GENERATORS):
            generators.append((f"self.{name}", value))
        elif isinstance(value, types.FunctionType):
            generators += host_random.referenced(value, seen)
        elif isinstance(value, tf_keras.layers.Layer):
            layers |= {id(layer): layer for layer in value._flatten_layers()}
    for layer in layers.values():
        for name, value in _attributes(layer):
            if isinstance(value, host_random.GENERATORS):
                generators.append((f"{layer.name}.{name}", value))
    for cls in dict.fromkeys(type(owner) for owner in (trainer, *layers.values())):
        for base in cls.__mro__:
            for name, function in vars(base).items():
                # The numbers of a dataset are drawn while it is read.
                if isinstance(function, types.FunctionType) and name != "build_dataset":
                    generators += host_random.referenced(function, seen)
    return generators


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        values = value.values() if isinstance(value, dict) else value
        yield from ((name, v) for v in (values if isinstance(value, list | dict) else [value]))
