"""Searches the text of the code that a user's step may run."""

from collections.abc import Iterator
import contextlib
import inspect
import re
import sys
from typing import Any, NamedTuple

from ctl.built.built_step import BuiltStep
from ctl.keras import models

_PACKAGES = ("ctl", "keras", "tensorflow", "tf_keras")


def names(step: BuiltStep, pattern: str) -> bool:
    """Returns whether a pattern is found in the files of a step's functions, models and layers.

    Args:
        step: the step.
        pattern: a regular expression.
    """
    return any(re.search(pattern, each.text) for each in texts(step))


class Text(NamedTuple):
    """The text of a file, or of a function of a notebook, and the line in which it begins."""

    file: str
    text: str
    first: int


def texts(step: BuiltStep) -> Iterator[Text]:
    """Yields the texts of a step's functions, models and layers.

    Args:
        step: the `BuiltStep`.
    """
    owner = step.attributes.owner
    parts = [*type(owner).__mro__, getattr(owner, "loss_fn", None), getattr(owner, "forward", None)]
    parts += [type(models.inner(layer)) for layer in step.attributes.layers()]
    searched: set[int] = set()
    for part in parts:
        module = getattr(part, "__module__", None) or ""
        with contextlib.suppress(OSError, TypeError, KeyError):
            # A notebook has no file, but a text for each function.
            has_file = hasattr(sys.modules[module], "__file__")
            text: Any = sys.modules[module] if has_file else part
            if id(text) not in searched and module.partition(".")[0] not in _PACKAGES:
                searched.add(id(text))
                lines, first = inspect.getsourcelines(text)
                yield Text(inspect.getsourcefile(text) or "", "".join(lines), max(first, 1))
