"""Names the layer and the user's line of code that created an op, and whether a replica did."""

import re

import tensorflow as tf

from ctl.configs.error_location import user_frame

_THREAD = "mirrored_run.py"  # the file of tf.distribute whose `run` calls the code of a replica
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


def is_in_replica(op: tf.Operation) -> bool:
    """Returns whether an op was created by the code of a replica."""
    return any(frame.name == "run" and frame.filename.endswith(_THREAD) for frame in op.traceback)
