"""Checks that the functions of a user take the arguments that ctl passes to them."""

from collections.abc import Callable, Sequence
import inspect
from typing import Any

from ctl.errors import UsageError


def check_methods(cls: type, base: type) -> None:
    """Raises UsageError if a method of `base` is overridden with other arguments.

    Args:
        cls: the class of the user.
        base: the class of ctl.
    """
    for name, method in inspect.getmembers(base, inspect.isfunction):
        own = inspect.getattr_static(cls, name)
        if name[0] == "_" or own is method or not inspect.isfunction(own):
            continue
        parameters = [
            p for p in inspect.signature(method).parameters.values() if p.kind < p.VAR_POSITIONAL
        ]
        required = [p.name for p in parameters if p.default is p.empty]
        # An override may leave out what has a default.
        check(f"{cls.__name__}.{name}", own, [p.name for p in parameters], required)


def check(name: str, function: Callable[..., Any], given: Sequence[str], *others: Any) -> None:
    """Raises UsageError if a function cannot be called with arguments, or names them in another order.

    Args:
        name: the name of the function, for messages.
        function: the function.
        given: the names of the arguments, of which `training` is passed by its name to a method.
        *others: the names of fewer arguments, with which it may be called, too.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C
        return
    names = [argument for argument in given if argument != "self"]
    own = [p.name for p in signature.parameters.values() if p.name in names]
    if own != [argument for argument in names if argument in own]:
        raise UsageError(
            f"{name} takes ({', '.join(own)}), but is called with ({', '.join(names)}): write its "
            "arguments in this order."
        )
    errors = []
    for each in (given, *others):
        by_name = dict.fromkeys(a for a in each if a == "training" and "self" in given)
        try:
            signature.bind(*(a for a in each if a not in by_name), **by_name)
            return
        except TypeError as error:
            errors.append(str(error))
    shown = [argument for argument in (others or [given])[-1] if argument != "self"]
    raise UsageError(f"{name} cannot be called with ({', '.join(shown)}): {errors[-1]}.")
