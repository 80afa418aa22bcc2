"""Checks that the functions of a user take the arguments that ctl passes to them."""

from collections.abc import Callable, Sequence
import contextlib
import difflib
import dis
import inspect
import itertools
import logging
import re
import sys
from typing import Any

from ctl.errors import UsageError
from ctl.keras import models

_LOG = logging.getLogger("ctl")
_OF_OPTIMIZERS = ("compute_gradients", "minimize", "aggregate_gradients")
_OF_KERAS_STEPS = ("GradientTape", "compiled_loss", "compute_loss")
_OF_OWN_STEPS = ("next", "get_next", "super", "run", "replica_step")
_OF_MODELS = ("train_step", "compute_loss", "make_train_function")


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
    step = inspect.getattr_static(cls, "train_step")
    names = {*step.__code__.co_names} if inspect.isfunction(step) else set()
    is_own = names & {*_OF_OWN_STEPS} or "iterator" in inspect.signature(step).parameters
    if names & {*_OF_KERAS_STEPS} and not is_own:
        raise UsageError(
            f"{cls.__name__}.train_step is written for a model of Keras, which passes it a batch; ctl "
            "passes it an iterator: define per_example_loss, or replica_step with self.minimize."
        )
    _warn_of_misspelt(cls, base)


def _warn_of_misspelt(cls: type, base: type) -> None:
    """Prints a line for methods with almost the name of a method of `base`, if nothing calls them."""
    own = cls.__mro__[: cls.__mro__.index(base)]
    sources = ""
    for module in {each.__module__ for each in own}:
        try:
            sources += inspect.getsource(sys.modules[module])
        except (OSError, TypeError, KeyError):  # it may call them
            return
    functions = {k: v for each in own for k, v in vars(each).items() if inspect.isfunction(v)}
    for name, function in functions.items():
        if name[0] == "_" or hasattr(base, name) or len(re.findall(rf"\b{name}\b", sources)) > 1:
            continue
        near = difflib.get_close_matches(name, dir(base), n=1, cutoff=0.9)
        expected = getattr(base, near[0]) if near and near[0] not in functions else None
        if inspect.isfunction(expected) and len(inspect.signature(function).parameters) == len(
            inspect.signature(expected).parameters
        ):
            _LOG.warning(
                "Nothing calls %s.%s: did you mean %s, which ctl calls?",
                cls.__name__, name, near[0],
            )  # fmt: skip


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


def names_of_attributes(cls: type, methods: Sequence[str]) -> set[str]:
    """Returns the attributes of `self` that some methods of a user's class read, or those they call.

    Args:
        cls: the class.
        methods: the names of its methods.
    """
    found: set[str] = set()
    pending = [*methods]
    while pending:
        name = pending.pop()
        for method in [vars(each).get(name) for each in cls.__mro__]:  # super() calls the others
            method = method.fget if isinstance(method, property) else method
            code: Any = getattr(method, "__code__", None)
            package = (getattr(method, "__module__", None) or "").partition(".")[0]
            is_own = code and code.co_argcount and package not in ("ctl", "orbit")
            codes = [code] if is_own else []
            for each in codes:
                codes += filter(inspect.iscode, each.co_consts)  # functions inside of it
                for value, load in itertools.pairwise(dis.get_instructions(each)):
                    is_self = value.argrepr.split(", ")[-1] == code.co_varnames[0]
                    if is_self and load.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                        pending += [load.argval] * (load.argval not in found)
                        found.add(load.argval)
    return {name for name in found if name[0] != "_"}


def check_optimizer(optimizer: object) -> None:
    """Raises UsageError if a user's optimizer overrides what the step does not call."""
    for name in _overridden(optimizer, _OF_OPTIMIZERS):
        raise UsageError(
            f"{type(optimizer).__name__} overrides {name}, which ctl does not call, because it computes "
            "and sums the gradients itself: override apply_gradients or update_step, or change the "
            "gradients in transform_gradients."
        )


def warn_of_model(model: object, optimizer: object, loss: object) -> None:
    """Prints a line if a user's model defines how it is trained in a way that nothing calls.

    Args:
        model: the model.
        optimizer: the optimizer that ctl trains it with.
        loss: the function of the losses, or the trainer.
    """
    model = models.inner(model)
    sources = ""
    for module in {type(model).__module__, getattr(loss, "__module__", "")}:
        with contextlib.suppress(OSError, TypeError, KeyError):
            sources += inspect.getsource(sys.modules[module])
    unused = [
        name
        for name in _overridden(model, _OF_MODELS)
        if not re.search(rf"(?<!super\(\))\.{name}\(", sources)  # the trainer may call it
    ]
    if unused:
        _LOG.warning(
            "%s overrides %s, which ctl does not call: its step trains by per_example_loss of the "
            "trainer, or loss_fn of ctl.Step.",
            type(model).__name__, " and ".join(unused),
        )  # fmt: skip
    compiled = getattr(model, "optimizer", None)
    if compiled is not None and compiled not in (optimizer, getattr(optimizer, "_ctl_of", None)):
        _LOG.warning(
            "The model was compiled with an optimizer and a loss, which ctl does not use: it trains "
            "with those of the trainer or ctl.Step."
        )


def _overridden(value: object, names: Sequence[str]) -> list[str]:
    """Returns the methods that a user's object, or its class, overrides; installed packages may."""
    found = [name for name in names if name in vars(value)]
    for each in type(value).__mro__:
        file = getattr(sys.modules.get(each.__module__), "__file__", None) or ""
        if (each.__module__ or "").partition(".")[0] in ("tf_keras", "keras"):
            break
        if "site-packages" not in file and each.__module__.partition(".")[0] != "ctl":
            found += [name for name in names if name in vars(each)]
    return found
