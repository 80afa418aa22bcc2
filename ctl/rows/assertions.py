"""Checks of numbers that are known only when a step runs, whose errors are one line."""

from collections.abc import Callable, Sequence
import contextlib
import math
import re

import tensorflow as tf

from ctl.graphs import ops

# Around a message, to find it in the error of TensorFlow.
_BEGIN, _END = "ctl rejects this step: ", " (end of the reason)"


def require_equal(
    one: int | tf.Tensor, two: int | tf.Tensor, problem: str
) -> contextlib.AbstractContextManager[None]:
    """Makes the ops inside the `with` block fail if two numbers differ; XLA ignores it.

    Args:
        one: a scalar.
        two: a scalar.
        problem: the message.
    """
    check = tf.debugging.assert_equal(one, two, f"{_BEGIN}{problem}{_END}")
    return tf.control_dependencies([] if check is None else [check])


def require(
    condition: tf.Tensor, value: tf.Tensor, problem: str, numbers: Callable[[], Sequence[tf.Tensor]]
) -> tf.Tensor:
    """Returns a tensor of floats if a condition holds; XLA, which ignores checks, returns NaN otherwise.

    Args:
        condition: a scalar bool.
        value: the tensor.
        problem: the message, with {} for each of the numbers.
        numbers: returns scalar tensors, which are computed if the condition does not hold.
    """
    if ops.is_compiled():
        return tf.where(condition, value, tf.constant(math.nan, value.dtype))

    def fail() -> tf.Operation:
        first, *others = f"{_BEGIN}{problem}{_END}".split("{}")
        data = [first, *(each for pair in zip(numbers(), others, strict=True) for each in pair)]
        return tf.raw_ops.Assert(condition=False, data=data, summarize=1)

    with tf.control_dependencies([tf.cond(condition, tf.no_op, fail)]):
        return tf.identity(value)


def explain(error: BaseException, loop: object) -> str:
    """Returns the `problem` of a check that failed when the step ran; "" for other errors."""
    if not isinstance(error, tf.errors.InvalidArgumentError):
        return ""
    match = re.search(f"{_BEGIN}(.*?){re.escape(_END)}", str(error))
    return match[1].replace("] [", "") if match else ""
