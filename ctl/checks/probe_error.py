"""The error of a probe that cannot compute the values of a traced step."""

from typing import Any

import tensorflow as tf

# What the code of a user may raise for other batches.
FAILURES = (tf.errors.OpError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)


class ProbeError(Exception):
    """The values cannot be computed.

    Attributes:
        op: the op that may combine rows, if it is known.
        counts: the number of entries on axis 0 of a value, and the number of rows, if they differ.
    """

    op: Any = None
    counts: tuple[int, int] | None = None
