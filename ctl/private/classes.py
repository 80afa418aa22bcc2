"""Changes the class of an object of Keras in place."""

import functools
from typing import Any


def extend(value: Any, extension: type) -> None:
    """Makes an object an instance of an extension of its class.

    The object stays the same, so that what refers to it, its name and its part of a checkpoint stay.

    Args:
        value: an object of Keras.
        extension: a class with the methods that are overridden, which call `super()`.
    """
    cls: Any = type(value)
    if issubclass(cls, extension):  # made from the config of an extended object
        return
    set_class(value, _extended(extension, cls))


def set_class(value: Any, cls: type) -> None:
    """Sets the class of an object of Keras, whose own `__setattr__` would track the class."""
    object.__setattr__(value, "__class__", cls)


@functools.cache
def _extended(extension: type, cls: Any) -> type:
    return type(cls.__name__, (extension, cls), {"__module__": cls.__module__})
