"""Numbers that libraries draw by TensorFlow's functions, keyed by row inside of `ctl.random.keyed`."""

from collections.abc import Callable
import inspect
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.graphs import ops
from ctl.random import Keying, categorical, draws, integers, normal, truncated_normal, uniform
from ctl.rows import row_mask
from ctl.rows.trace import Stream

_NAME = "ctl.random.keyed"
_LOOP = (
    "ctl.random.keyed got a draw in a loop, which may be for one row: draw [rows, ...] numbers, or by "
    "ctl.random.uniform([], shared=True) and the like."
)
_ONE_ROW = (
    "ctl.random.keyed got a draw of shape [1, ...] for one row, which may be for that row or for all: "
    "use a batch with at least two rows in each replica and micro-batch, or draw by ctl.random."
)


def draw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Draws by row in a step inside of `keyed`, for an op of TensorFlow."""
    rows = row_mask.current() if row_mask.in_step() else None
    if rows is None:
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    name, given = original.__name__, bound.arguments
    logits, shape = given.get("logits"), given.get("shape")
    if logits is not None:
        logits = tf.repeat(tf.expand_dims(logits, 1), given["num_samples"], axis=1)
        shape = tf.shape(logits)
    shape = tf.convert_to_tensor(shape, tf.int32)
    first = draws.static_size(shape) if shape.shape[0] != 0 else -1
    is_by_row = rows.count is not None and first is None
    if isinstance(rows.count, int) and first is not None:
        is_by_row = first in {rows.count * views for views in (1, *rows.trace.views)}
        if first == rows.count == 1:
            raise UsageError(_ONE_ROW)
    if not is_by_row and draws.loop_counters(rows, Stream(_NAME, _NAME)):
        raise UsageError(_LOOP)
    keying: Keying = {"name": _NAME, "shared": not is_by_row}
    if logits is not None:
        numbers = categorical(logits, given["output_dtype"], **keying)
    elif "int" in name:
        low, high = given["minval"], given["maxval"]
        numbers = integers(shape, low, high, tf.convert_to_tensor(low).dtype, **keying)
    else:
        function = uniform if "uniform" in name else truncated_normal if "trunc" in name else normal
        numbers = function(shape, dtype=given["dtype"], **keying)
    if not is_by_row:
        return tf.identity(numbers, name=ops.SHARED_NUMBERS)
    numbers = tf.identity(numbers)
    if isinstance(rows.count, int) and first == rows.count:
        # The search for coupled rows rejects a shape that begins with this number by chance.
        rows.trace.row_wise.append((numbers, []))
    return numbers
