"""Names the layer and the user's line of code that created an op."""

import re

import tensorflow as tf

from ctl.configs.error_location import user_frame

_REPLICA = re.compile(r"^replica_\d+(/|$)")


def place_of(op: tf.Operation, *, own_parts: int = 2) -> str:
    """Names the layer and the user's line of code that created an op.

    Args:
        op: the op.
        own_parts: the number of parts at the end of the op's name that do not name the layer. Functions
            such as tf.random.uniform add a scope of their own to the name of the op.
    """
    line = user_frame([(frame.filename, frame.lineno) for frame in op.traceback])
    scope = _REPLICA.sub("", "/".join(op.name.split("/")[:-own_parts]))
    if line is None:
        return f"Layer {scope or op.name}"
    return f"{line} (in {scope})" if scope else line
