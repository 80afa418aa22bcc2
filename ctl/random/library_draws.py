"""Numbers that libraries draw by TensorFlow's functions, keyed by row inside of `ctl.random.keyed`."""

from collections.abc import Callable, Mapping
import inspect
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.graphs import ops
from ctl.random import Keying, draws, gumbel, integers, normal, philox, truncated_normal, uniform
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
    sizes = tf.zeros(shape).shape.as_list()  # all that is known of it
    axis = _axis_of_rows(sizes, rows)
    if axis is None and draws.loop_counters(rows, Stream(_NAME, _NAME)):
        raise UsageError(_LOOP)
    order = sorted(range(len(sizes)), key=lambda i: i != axis)  # the rows first
    shape = [shape[i] if sizes[i] is None else sizes[i] for i in order]
    keying: Keying = {"name": _NAME, "shared": axis is None}
    if logits is not None:
        numbers = gumbel(shape, philox.working_dtype(logits.dtype), **keying)
    elif "int" in name:
        numbers = integers(shape, *_range(given), **keying)
    else:
        function = uniform if "uniform" in name else truncated_normal if "trunc" in name else normal
        numbers = function(shape, dtype=given["dtype"], **keying)
    numbers = tf.identity(numbers, name=ops.SHARED_NUMBERS if axis is None else None)
    if axis is not None and isinstance(rows.count, int) and shape[0] == rows.count:
        # The search for coupled rows rejects a shape that has this number by chance.
        rows.trace.row_wise.append((numbers, []))
    numbers = (
        tf.transpose(numbers, [order.index(i) for i in range(len(order))]) if axis else numbers
    )
    if logits is None:
        return numbers
    return tf.argmax(tf.cast(logits, numbers.dtype) + numbers, -1, given["output_dtype"])


def _range(given: Mapping[str, Any]) -> tuple[Any, Any, tf.DType]:
    """Returns the bounds and the dtype of a draw of integers."""
    low = given.get("minval")
    if low is not None:
        return low, given.get("maxval"), tf.convert_to_tensor(low).dtype
    low = max(given["dtype"].min, -(2**31))  # a seed, of which 32 bits suffice
    return low, low + 2**32, given["dtype"]


def _axis_of_rows(sizes: list[int | None], rows: row_mask.Rows) -> int | None:
    """Returns the axis of a draw that has the number of rows or views; None if all rows share it."""
    if rows.count is None:
        return None
    views = (1, *rows.trace.views)
    counts = [rows.count * each for each in views] if isinstance(rows.count, int) else []
    if counts[:1] == [1] and 1 in sizes:
        raise UsageError(_ONE_ROW)
    axes = [i for known in (counts, [None]) for i, size in enumerate(sizes) if size in known]
    return axes[0] if axes else None
