"""Checks of numbers that are known only when a step runs, whose errors are one line."""

from collections.abc import Iterator
import contextlib
import re
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError

# Around a message, to find it in the error of TensorFlow.
_BEGIN, _END = "ctl found a problem: ", " (end of the problem)"


def require_equal(one: Any, two: Any, problem: str) -> contextlib.AbstractContextManager[Any]:
    """Makes the ops inside the `with` block fail if two numbers differ; XLA ignores it.

    Args:
        one: a scalar.
        two: a scalar.
        problem: the message.
    """
    check = tf.debugging.assert_equal(one, two, f"{_BEGIN}{problem}{_END}")
    return tf.control_dependencies([] if check is None else [check])


@contextlib.contextmanager
def report_problems() -> Iterator[None]:
    """Raises the `problem` of a check that fails when the step runs as a UsageError."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        match = re.search(f"{_BEGIN}(.*?){re.escape(_END)}", str(error))
        if match is None:
            raise
        raise UsageError(match[1]) from None
