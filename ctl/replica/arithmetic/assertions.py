"""Checks of numbers that are known only when a step runs, whose errors are one line."""

import contextlib
import re
from typing import Any

import tensorflow as tf

# Around a message, to find it in the error of TensorFlow.
_BEGIN, _END = "ctl rejects this step: ", " (end of the reason)"


def require_equal(one: Any, two: Any, problem: str) -> contextlib.AbstractContextManager[Any]:
    """Makes the ops inside the `with` block fail if two numbers differ; XLA ignores it.

    Args:
        one: a scalar.
        two: a scalar.
        problem: the message.
    """
    check = tf.debugging.assert_equal(one, two, f"{_BEGIN}{problem}{_END}")
    return tf.control_dependencies([] if check is None else [check])


def explain(error: BaseException, trainer: Any) -> str:
    """Returns the `problem` of a check that failed when the step ran; "" for other errors."""
    if not isinstance(error, tf.errors.InvalidArgumentError):
        return ""
    match = re.search(f"{_BEGIN}(.*?){re.escape(_END)}", str(error))
    return match[1] if match else ""
