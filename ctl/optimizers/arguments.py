"""Imports, checks and calls the functions that a config names."""

from collections.abc import Callable, Mapping
import importlib
import inspect
import math
import re
from typing import Any

from ctl import errors
from ctl.errors import UsageError
from ctl.optimizers import CLIPPING

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
WHOLE = (*CLIPPING, "use_ema")  # arguments that require complete variables
# Arguments of tf_keras' optimizers that ctl sets itself, or replaces by an option of its own.
REPLACED = {
    "clipnorm": "set optimizer.clip.norm, which bounds the gradient of the global batch",
    "clipvalue": "set optimizer.clip.value, which bounds the gradient of the global batch",
    "global_clipnorm": "set optimizer.clip.global_norm",
    "use_ema": "set optimizer.ema_decay",
    "ema_momentum": "set optimizer.ema_decay",
    "ema_overwrite_frequency": "set optimizer.ema_decay, which never overwrites the weights",
    "jit_compile": "set runtime.xla",
    "kwargs": "name the argument itself",
}
# Bounds of the arguments of these names: whether a value is allowed, and what the message requires.
_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(
        ("beta_1", "beta_2", "rho", "momentum"),
        (lambda v: 0 <= v < 1, "at least 0 and less than 1"),
    ),
    **dict.fromkeys(
        ("epsilon", "epsilon_1", "epsilon_2", "initial_accumulator_value", "clip_threshold"),
        (lambda v: v >= 0, "at least 0"),
    ),
}


def is_function_name(name: str) -> bool:
    """Returns whether a name has the form `package.module:function`."""
    return _FUNCTION.fullmatch(name) is not None


def load(key: str, name: str) -> Callable[..., Any]:
    """Imports the function or class `package.module:name`.

    Args:
        key: the config key, for messages.
        name: the name of the module and of the function.

    Raises:
        UsageError: the module cannot be imported, or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"{key} is {name!r}, but {module_name} cannot be imported ({type(error).__name__}: "
            f"{error}): correct the name, or install it."
        ) from None
    function: Any = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        hint = errors.did_you_mean(function_name, known) if known else ": it has no functions."
        raise UsageError(f"{key} is {name!r}, but {module_name} has no {function_name}{hint}")
    return function


def check(
    function: Callable[..., Any], given: Mapping[str, Any], *, reserved: Mapping[str, str], key: str
) -> None:
    """Checks the arguments that a config gives a function.

    Args:
        function: the function or class.
        given: name -> value.
        reserved: arguments that have a config key of their own -> that key.
        key: the section of the config that has the arguments, for messages.

    Raises:
        UsageError: the function has no such argument, or the value has the wrong type.
    """
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # tf_keras' optimizers accept **kwargs only to reject them.
    open_ended = open_ended and "tf_keras" not in (getattr(function, "__module__", "") or "")
    for name, value in given.items():
        full_name = f"{key}.{name}"
        if name in reserved or name in REPLACED:
            fix = REPLACED.get(name) or f"set {reserved[name] or f'optimizer.{name}'}"
            raise UsageError(f"{full_name} has no effect: {fix}, and remove it.")
        if name not in parameters:
            if open_ended:
                continue
            known = [n for n in parameters if n not in {*reserved, *REPLACED, "name", "self"}]
            hint = errors.did_you_mean(name, known) or f": {function.__name__} has no arguments."
            raise UsageError(f"{full_name} is not an argument of {function.__name__}{hint}")
        _check_value(full_name, name, value, parameters[name].default)


def call(what: str, function: Callable[..., Any], **values: Any) -> Any:
    """Calls a function of the table or of the user, and reports an error in one line.

    Args:
        what: what the function makes, for messages.
        function: the function or class.
        **values: its arguments.

    Raises:
        UsageError: the function raised a TypeError or a ValueError.
    """
    try:
        return function(**values)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        name = getattr(function, "func", function).__name__  # if it is a partial
        reason = " ".join(str(error).split())
        raise UsageError(
            f"The {what} cannot be made: {name} raised {type(error).__name__}: {reason}"
        ) from error


def _check_value(full_name: str, name: str, value: Any, default: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise UsageError(f"{full_name} is {value!r}, but must be true or false.")
    elif isinstance(default, int | float) and not (is_number and math.isfinite(value)):
        raise UsageError(f"{full_name} is {value!r}, but must be a finite number.")
    allowed, requirement = _BOUNDS.get(name, (None, ""))
    if allowed and is_number and not allowed(value):
        raise UsageError(f"{full_name} is {value!r}, but must be {requirement}.")
