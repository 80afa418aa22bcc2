"""Applies AutoGraph to users' functions, but not to ctl's own.

AutoGraph converts every function that a converted function calls. Without the rule below it converts
all of ctl's code, in every trace and on every replica, which takes most of the time of a first step.
"""

from collections.abc import Callable
import functools
import linecache
from typing import Any, TypeVar

import tensorflow as tf

from ctl.private.tensorflow import autograph_artifact, autograph_config

T = TypeVar("T", bound=Callable)


def without_ctl(rules: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adds a rule to those of AutoGraph by which functions of ctl are called as they are.

    AutoGraph stays active inside of them, so that tf_keras converts the layers and metrics that users
    write.
    """
    return autograph_config.DoNotConvert("ctl"), *rules


def convert(function: T) -> T:
    """Converts a user's function by AutoGraph, so that Python `if` and `for` work on tensors.

    Args:
        function: a hook of a trainer, or another function that a user passed to ctl.

    Returns:
        The converted function; the function itself in eager execution, without source code, and in
        code that the user excluded by `tf.autograph.experimental.do_not_convert`.
    """
    if tf.executing_eagerly():
        return function
    code = getattr(function, "__code__", None)
    if code and not linecache.getlines(code.co_filename, function.__globals__):
        # Typed at a prompt that keeps no source: AutoGraph would print a warning, and call it as it is.
        return tf.autograph.experimental.do_not_convert(function)
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def traced(function: Callable[..., Any], **options: Any) -> Any:
    """Returns a `tf.function` of one of ctl's functions, which may call users' functions.

    `tf.function(..., autograph=False)` would exclude the users' functions, too.

    Args:
        function: the function, which is not converted itself.
        **options: arguments of `tf.function`, such as `jit_compile`.
    """

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return tf.function(autograph_artifact(call), **options)
