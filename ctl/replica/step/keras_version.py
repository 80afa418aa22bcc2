"""Detects objects of Keras 3 where tf_keras is required.

The optimizers of Keras 3 always sum the gradients over the replicas, which ctl has summed already, and
its loss scale is decided on each replica. Inside tf_keras its objects fail with errors that do not name
the cause, or their variables silently stay untrained.
"""

from collections.abc import Iterator, Mapping
import contextlib
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError, type_name

_FIX = (
    "ctl requires tf_keras, so write `import tf_keras` instead of `import keras`, and import ctl (or "
    "set TF_USE_LEGACY_KERAS=1) before tf.keras is first used."
)


def is_keras3(value: Any) -> bool:
    """Returns whether the class of a value, or a base class of it, is from the package `keras`."""
    return any(base.__module__.partition(".")[0] == "keras" for base in type(value).__mro__)


def check_tracked(value: Any, place: str) -> None:
    """Raises UsageError if a value, or an object that it tracks, is of Keras 3.

    Args:
        value: any object; one that tracks others is searched completely, such as a model.
        place: what the value is, such as "build_model returned".
    """
    for each in _tracked(value):
        if is_keras3(each):
            inside = "" if each is value else f"{type_name(value)} that contains "
            raise UsageError(f"{place} {inside}{type_name(each)} of Keras 3: {_FIX}")


@contextlib.contextmanager
def report_keras3() -> Iterator[None]:
    """Turns an error that an object of Keras 3 causes into a UsageError of one line."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        value = _find_in_traceback(error)
        if value is None:
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"{type_name(value)} of Keras 3 is used with tf_keras ({type(error).__name__}: {reason}): "
            f"{_FIX}"
        ) from error


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
    """Returns a Keras 3 object in the local variables of the innermost frame with one, or None.

    The messages of tf_keras do not name the object's package, but the functions that reject the
    object hold it.
    """
    result, frame = None, error.__traceback__
    while frame is not None:
        for value in list(frame.tb_frame.f_locals.values()):
            nested = value.values() if isinstance(value, Mapping) else value
            values = nested if isinstance(value, list | tuple | dict) else [value]
            result = next((each for each in values if is_keras3(each)), result)
        frame = frame.tb_next
    return result
