"""Detects objects of Keras 3, and rejects those that cannot take part in a step.

A layer of Keras 3 inside of a tf_keras model, or the other way round, fails with an error that does not
name the cause, or its variables silently stay untrained.
"""

from collections.abc import Iterator, Mapping
import functools
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError, type_name

_MIXED = (
    "a model has layers of one of the two packages, so import either keras or tf_keras. In code that "
    "uses tf.keras, it is tf_keras if TF_USE_LEGACY_KERAS=1 is set before its first use, else Keras 3."
)


def is_keras3(value: Any, kind: str = "") -> bool:
    """Returns whether the class of a value, or a base class of it, is from the package `keras`.

    Args:
        value: any value.
        kind: the name of the class or base class, such as "Layer"; any by default.
    """
    return _is_of(type(value).__mro__, "keras", kind)


def check(value: Any, place: str) -> None:
    """Raises UsageError if an object of tf_keras tracks an object of Keras 3, or is one.

    Args:
        value: any object; one that tracks others is searched completely, such as a model.
        place: what the value is, such as "build_model returned".
    """
    for each in _tracked(value):
        if is_keras3(each):
            inside = "" if each is value else f"{type_name(value)} that contains "
            kind, name = f"{type(each).__module__}...".split(".")[2], type(each).__name__
            fix = _MIXED
            if is_keras3(each, "Variable"):
                fix = "use tf.Variable, or add_weight of a layer."
            elif kind in ("optimizers", "metrics") and hasattr(getattr(tf_keras, kind), name):
                fix = f"write tf_keras.{kind}.{name}."
            raise UsageError(f"{place} {inside}{type_name(each)} of Keras 3: {fix}")


def explain(error: BaseException, loop: object) -> str:
    """Explains an error of one of the packages about an object of the other; "" for other errors."""
    value = _find_in_traceback(error)
    if value is None:
        return ""
    reason = (str(error).strip().splitlines() or [""])[0]
    package, other = ("Keras 3", "tf_keras") if is_keras3(value) else ("tf_keras", "Keras 3")
    return (
        f"{type_name(value)} of {package} is used with {other} ({type(error).__name__}: {reason}): "
        f"{_MIXED}"
    )


def _tracked(value: Any) -> Iterator[Any]:
    """Yields a value and the objects that it tracks, without the children of optimizers."""
    pending, seen = [value], set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        # A tf_keras optimizer fixes its children when they are first listed: slot variables and a loss
        # scale that are created later would be in no checkpoint.
        is_optimizer = isinstance(each, tf_keras.optimizers.Optimizer)
        if isinstance(each, tf.__internal__.tracking.Trackable) and not is_optimizer:
            pending += tf.train.TrackableView.children(each).values()


def _find_in_traceback(error: BaseException) -> Any:
    """Returns an object of one package in the innermost frame of the other that holds one, or None.

    The messages do not name the object's package, but the functions that reject the object hold it.
    """
    result, frame = None, error.__traceback__
    while frame is not None:
        package = frame.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        other = {"keras": "tf_keras", "tf_keras": "keras"}.get(package, "")
        for value in list(frame.tb_frame.f_locals.values()) if other else ():
            nested = value.values() if isinstance(value, Mapping) else value
            values = nested if isinstance(nested, list | tuple) else [value]
            result = next((each for each in values if _is_of(type(each).__mro__, other)), result)
        frame = frame.tb_next
    return result


@functools.lru_cache(1024)  # each training loop asks for every attribute of the trainer
def _is_of(classes: tuple[type, ...], package: str, kind: str = "") -> bool:
    return any(
        base.__module__.partition(".")[0] == package and kind in ("", base.__name__)
        for base in classes
    )
