"""Random numbers of a step, keyed by (seed, stream, call, iterations of loops, step, row).

A draw has an entry for each row of this replica's batch on axis 0, or several consecutive entries per
row. It is the slice of the draw for the global batch, on any split.
"""

from collections.abc import Container, Sequence
import dataclasses
import math
import re
import sys
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.graphs.dataflow import Fold, find_fold
from ctl.random import philox
from ctl.random.philox import Number, Shape
from ctl.rows import gather, replicas, row_mask
from ctl.rows.assertions import require_equal
from ctl.rows.trace import Folded, Stream

# The functions of TensorFlow that trace a backward pass, for tf.GradientTape and for tf.function.
_BACKWARD = ("imperative_grad", "_GradientsHelper")
_VECTORIZED = re.compile(r"(^|/)loop_body(_\d+)?(/|$)")  # the scope of tf.vectorized_map
# The step of an evaluation: its numbers depend on the position of a row in the data, and not on when
# it is evaluated.
_EVALUATION = 2**64 - 2
_GAMMA_TRIES = 12  # each is rejected with a probability of at most 0.05, so all are with 2e-16
_PROBLEM = (
    "{name} draws random numbers of shape [{entries}, ...], which do not belong to the{count} rows of "
    "this replica: draw [rows, ...] with the rows of the batch on axis 0 (views of each row by "
    "ctl.replica.views(a, b), or tf.repeat(x, 2, axis=0)), or use "
    "ctl.random with per_row=N for N consecutive entries of each row, or with shared=True for numbers "
    "that all rows share."
)


def uniform(
    shape: Shape, stream: Stream, *, dtype: tf.DType = tf.float32, **rows: Any
) -> tf.Tensor:
    """Draws float32 numbers in [0, 1) that cast to `dtype` without rounding; see `draw_bits`."""
    return _shaped(philox.to_unit(draw_bits(shape, stream, **rows), dtype), shape, **rows)


def normal(shape: Shape, stream: Stream, *, dtype: tf.DType = tf.float32, **rows: Any) -> tf.Tensor:
    """Draws numbers from the normal distribution, in the working dtype of `dtype`; see `draw_bits`."""
    return _shaped(philox.to_normal(draw_bits(shape, stream, **rows), dtype), shape, **rows)


def integers(
    shape: Shape, stream: Stream, low: Number, high: Number, dtype: tf.DType, **rows: Any
) -> tf.Tensor:
    """Draws integers in [low, high); see `draw_bits`."""
    numbers = philox.to_integers(draw_bits(shape, stream, **rows), low, high, dtype)
    return _shaped(numbers, shape, **rows)


def log_gamma(
    shape: Shape, stream: Stream, alpha: float, dtype: tf.DType, **rows: Any
) -> tf.Tensor:
    """Draws logarithms of gamma numbers (Marsaglia and Tsang 2000); see `draw_bits`.

    The number of tries is fixed, and the first accepted one counts: so each element uses the same
    number of draws, whatever its values are.
    """
    # An element needs a normal number, a uniform number, and a uniform number for the boost.
    streams = [dataclasses.replace(stream, identity=stream.identity + part) for part in "nub"]

    def unit(shape: Shape, stream: Stream) -> tf.Tensor:
        numbers = uniform(shape, stream, **rows)
        return tf.cast(numbers, philox.working_dtype(dtype)) + 2.0**-24  # in (0, 1)

    boost = alpha < 1  # the method requires alpha >= 1: G(alpha) = G(alpha + 1) U^(1 / alpha)
    d = (alpha + 1 if boost else alpha) - 1 / 3
    tries = tf.concat([tf.cast(shape, tf.int32), [_GAMMA_TRIES]], axis=0)
    x = normal(tries, streams[0], dtype=dtype, **rows)
    v = (1 + x / math.sqrt(9 * d)) ** 3
    log_v = tf.math.log(tf.maximum(v, 1e-30))
    accepted = (v > 0) & (tf.math.log(unit(tries, streams[1])) < 0.5 * x * x + d * (1 - v + log_v))
    first = tf.argmax(tf.cast(accepted, tf.int32), axis=-1)
    logs = math.log(d) + tf.gather(log_v, first, batch_dims=len(log_v.shape) - 1)
    return logs + tf.math.log(unit(shape, streams[2])) / alpha if boost else logs


def dropout(
    inputs: tf.Tensor, stream: Stream, rate: Number, noise_shape: Shape | None, **rows: Any
) -> tf.Tensor:
    """Drops elements as `tf.nn.dropout` does; see `draw_bits`."""

    def sample(shape: Shape, dtype: tf.DType, **_: Any) -> tf.Tensor:
        return tf.cast(uniform(shape, stream, inputs=inputs, **rows), dtype)

    return tf.nn.experimental.general_dropout(
        inputs, rate=rate, noise_shape=noise_shape, uniform_sampler=sample
    )


def permutation(rows: row_mask.Rows, stream: Stream) -> tf.Tensor:
    """Draws a permutation of the global batch; returns the entries of this replica's rows.

    Args:
        rows: this replica's rows, with a known count.
        stream: identifies the draw.

    Returns:
        [rows] int32 positions in the global batch, without padding.
    """
    # `positions` raises the error if the rows of the global batch cannot be read here.
    own = gather.positions(tf.zeros([rows.count]))
    if rows.row_mask is None:
        assert rows.count is not None
        _, total = row_mask.row_range(rows.count)
    else:
        total = tf.shape(gather.all_gather(tf.cast(rows.row_mask > 0, tf.int32)))[0]
    bits = draw_bits([total], stream, shared=True)[0, :total]
    # A stable sort is deterministic even if two of the random numbers are equal.
    order = tf.argsort(bits, direction="DESCENDING", stable=True)
    return tf.gather(order, own)


def draw_bits(
    shape: Shape,
    stream: Stream,
    *,
    shared: bool = False,
    per_row: int | None = None,
    inputs: tf.Tensor | None = None,
) -> tf.Tensor:
    """Draws random bits.

    Args:
        shape: the shape of the numbers, [entries, ...]; any shape if `shared`.
        stream: identifies the draw.
        shared: draw the same numbers on every replica, for all rows.
        per_row: the number of consecutive entries of each row; read from the ops by default.
        inputs: a tensor [entries, ...] that the numbers are combined with.

    Returns:
        [entries, multiple of 4] uint32; [1, ...] if `shared`.

    Raises:
        UsageError: axis 0 does not hold the rows of this replica, or the numbers cannot be keyed here.
    """
    rows = row_mask.current() or _outside(stream)
    identity = stream.identity
    if rows.update:
        identity += f" {rows.update}{', merged' if replicas.local_number() is None else ''}"
    # Counted while the step is traced: a layer that is called twice in a step draws other numbers.
    call = rows.calls.get(identity, 0)
    rows.calls[identity] = call + 1
    key = philox.make_key(f"{identity} {call}")
    loops = loop_counters(rows, stream)
    for counter in loops:
        key = philox.fold_in(key, counter)
    blocks = _row_size(shape, shared)[1]
    step = rows.step if rows.earlier is None else tf.constant(_EVALUATION, tf.uint64)
    if shared:
        return philox.draw_bits(1, blocks, key=key, first=0, step=step)
    entries, fold, problem = _fold(
        shape, rows, stream, inputs=inputs, per_row=per_row, in_loop=bool(loops)
    )
    # Entry j of row r is entry r x per_row + j of the global batch; the views of a row are consecutive.
    first = rows.first_row
    if rows.earlier is not None:
        first = tf.cast(first, tf.int64) + rows.earlier()
    if fold != Fold():
        first = tf.cast(first, tf.uint64) * (fold.views * fold.per_row)
    bits = philox.draw_bits(entries, blocks, key=key, first=first, step=step)
    if fold.views > 1:
        by_row = [rows.count, *fold, bits.shape[1] or tf.shape(bits)[1]]
        bits = fold.entries(tf.reshape(bits, by_row))
    if problem and isinstance(rows.count, int):
        rows.trace.folded.append(Folded(bits, rows.count, fold, problem))
    return bits


def _outside(stream: Stream) -> row_mask.Rows:
    """Returns the rows of a draw outside of a step, which is a function of its arguments alone.

    Raises:
        UsageError: it is on a replica, where the numbers would be the same in all steps.
    """
    if tf.distribute.has_strategy() and replicas.local_number() is not None:
        raise UsageError(
            f"{stream.name} draws random numbers on a replica outside of a step, where they would be "
            "the same in every call: draw in the code of a trainer or ctl.Step, or in its optimizer."
        )
    return row_mask.Rows()


def _fold(
    shape: Shape,
    rows: row_mask.Rows,
    stream: Stream,
    *,
    inputs: tf.Tensor | None,
    per_row: int | None,
    in_loop: bool,
) -> tuple[Number, Fold, str]:
    """Finds how the entries on axis 0 of a draw belong to the rows of this replica.

    Returns:
        The number of entries, their fold, and the message if the ops of the step do not confirm it.
    """
    count, entries = rows.count, static_size(shape)
    same = isinstance(count, int) and entries == count and per_row in (None, 1)
    if count is None or same:
        return shape[0], Fold(), ""
    known = f" {count}" if isinstance(count, int) else ""
    message = _PROBLEM.format(
        name=stream.name, entries="?" if entries is None else entries, count=known
    )
    fold = None if per_row or in_loop else find_fold(_source(shape, inputs), count)
    if isinstance(count, int) and entries is not None:
        guess = _divide(entries, count, per_row, rows.trace.views)
        # An iteration may well be for a row, as in tf.map_fn.
        if guess is None or (in_loop and per_row is None):
            raise UsageError(message)
        return entries, fold or guess, "" if per_row or not count else message
    fold = fold or Fold(1, per_row or 1)
    # Known only when the step runs. XLA ignores assertions; there the reshape to `shape` fails.
    size = count * fold.views * fold.per_row
    with require_equal(shape[0], size, message):
        return tf.identity(size), fold, ""


def _divide(
    entries: int, count: int, per_row: int | None, known_views: Container[int]
) -> Fold | None:
    """Divides static numbers of entries and rows; returns None if the entries do not fit the rows."""
    # A replica without rows has no entries either.
    if entries % max(count, 1) or (per_row and entries != per_row * count):
        return None
    width = entries // count if count else 1
    views = width if width in known_views and not per_row else 1
    return Fold(views, width // views)


def _source(shape: Any, inputs: tf.Tensor | None) -> tf.Tensor | None:
    """Returns the tensor that numbers are for: `inputs`, or the tensor whose shape they have."""
    if inputs is None and hasattr(shape, "graph"):
        return shape.op.inputs[0] if shape.op.type == "Shape" else None
    return inputs if hasattr(inputs, "graph") else None


def loop_counters(rows: row_mask.Rows, stream: Stream) -> list[tf.Tensor]:
    """Returns the counters of the loops of this step that the draw is in, from outside in.

    Raises:
        UsageError: the numbers would be drawn again in the backward pass, or once for several rows.
    """
    counters: list[tf.Tensor] = []
    if tf.executing_eagerly():
        return counters
    if _in_backward_pass():
        raise UsageError(
            f"{stream.name} draws random numbers in the backward pass, where they would not be those of "
            "the forward pass: use ctl.recompute instead of tf.recompute_grad, or draw in the forward "
            "pass of your tf.custom_gradient."
        )
    for graph in row_mask.enclosing_graphs():
        if _VECTORIZED.search(graph.get_name_scope()):
            raise UsageError(
                f"{stream.name} draws random numbers in tf.vectorized_map, which draws once for all of "
                "its rows: draw [rows, ...] numbers before it, and map over them too."
            )
        if graph is rows.graph:
            break
        # Its first input is the number of the iteration (tensorflow/python/ops/while_v2.py). The loop
        # over training steps is not one of these: the step is traced inside of it.
        if type(graph).__name__ in ("WhileBodyFuncGraph", "WhileCondFuncGraph"):
            counters.insert(0, graph.inputs[0])
    return counters


def _in_backward_pass() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        # The second pass of ctl.recompute draws the numbers of the first one.
        if frame.f_code.co_name == "replay_forward_pass":
            return False
        if frame.f_code.co_name in _BACKWARD:
            return True
    return False


def _shaped(numbers: tf.Tensor, shape: Shape, shared: bool = False, **_: Any) -> tf.Tensor:
    return tf.reshape(numbers[:, : _row_size(shape, shared)[0]], shape)


def static_size(shape: Shape) -> int | None:
    """Returns the first number of a shape; None if it is known only when the step runs."""
    if tf.is_tensor(shape):
        static = tf.get_static_value(shape, partial=True)
        return None if static is None or static[0] is None else int(static[0])
    first = shape[0]
    if tf.is_tensor(first):
        first = tf.get_static_value(first)
    return None if first is None else int(first)


def _row_size(shape: Shape, shared: bool = False) -> tuple[Any, Any]:
    """Returns how many numbers a row needs, and the number of Philox blocks that contain them."""
    inner: Sequence[Any] | tf.Tensor = shape if shared else shape[1:]
    static = tf.get_static_value(tf.convert_to_tensor(inner, tf.int32))
    if static is not None:
        size = math.prod(int(n) for n in static)
        return size, -(-size // philox.BLOCK)  # rounded up
    product = tf.reduce_prod(inner)
    return product, -(-product // philox.BLOCK)
