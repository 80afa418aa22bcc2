"""Counts a penalty that a layer adds as a function in `call` once in each forward pass.

tf_keras keeps such functions for as long as the layer exists: each trace of the layer, and that of each
replica, would count the penalty once more.
"""

import traceback
from typing import Any

import tensorflow as tf

from ctl.graphs import passes
from ctl.keras.private import autocast_variable, base_layer_utils
from ctl.rows import row_mask


def add_loss(original: Any, layer: Any, losses: Any, **kwargs: Any) -> None:
    """Adds penalties to a layer of tf_keras; none in a recomputation, which would add them again."""
    if passes.in_second_pass():
        return
    losses = tf.nest.flatten(losses)
    functions = [loss for loss in losses if callable(loss)]
    # A function that `build` adds, such as the regularizer of a weight, is added once in any case.
    is_in_call = layer.built and base_layer_utils.call_context().in_call
    if not (functions and is_in_call) or _is_in_build(layer):
        original(layer, losses, **kwargs)
    elif row_mask.current() is None:  # such as the construction of a functional model
        original(layer, losses, **kwargs)
        for function in layer._callable_losses[-len(functions) :]:
            function.ctl_in_call = True
    else:
        # tf_keras holds functools.partial(_tag_callable, function). Those of a functional model that was
        # made before `add_loss` was replaced have no mark, but the code of the function.
        codes = {function.__code__ for function in functions if hasattr(function, "__code__")}
        layer._callable_losses[:] = [
            each
            for each in layer._callable_losses
            if not hasattr(each, "ctl_in_call")
            and getattr(each.args[0], "__code__", None) not in codes
        ]
        # As tf_keras does, because penalties are unstable in 16 bits.
        with autocast_variable.enable_auto_cast_variables(None):
            losses = [loss() if callable(loss) else loss for loss in losses]
        original(layer, losses, **kwargs)


def _is_in_build(layer: Any) -> bool:
    """Returns whether `build` of a layer runs, within a call; it may have set `built` before."""
    for frame, _ in traceback.walk_stack(None):
        code = frame.f_code
        is_of_layer = code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is layer
        if is_of_layer and code.co_name in ("build", "call", "tf__call"):
            return code.co_name == "build"
    return False
