"""Gathers the rows of the global batch on every replica, for losses and metrics that compare rows.

A loss over pairs of rows (contrastive losses, triplet mining) and a mix of rows (mixup) are functions
of the global batch only if each row sees the rows of all replicas.
"""

from typing import Any

import tensorflow as tf

from ctl.data.source import Nest
from ctl.errors import UsageError
from ctl.graphs.dataflow import Fold, find_fold
from ctl.hardware import strategies
from ctl.rows import replicas, row_mask
from ctl.rows.trace import symbolic

# The dtype in which rows, and gradients of rows, are summed over the replicas. 16-bit floats would round
# the sums of gradients; collectives support few integers, and MirroredStrategy no two int32 at a time.
_INTEGERS = (tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64)
_SUMMED_AS = {
    **{dtype: dtype for dtype in (tf.float32, tf.float64)},
    **dict.fromkeys((tf.float16, tf.bfloat16), tf.float32),
    **dict.fromkeys((tf.bool, *_INTEGERS), tf.int64),
}


def all_gather(values: Nest) -> Nest:
    """Returns the rows of all replicas, in the order of the global batch, without padding.

        def per_example_loss(self, batch, outputs):     # InfoNCE: each image against all texts
            texts = ctl.replica.all_gather(outputs["text"])                     # [all rows, width]
            logits = tf.matmul(outputs["image"], texts, transpose_b=True)       # [rows, all rows]
            return tf_keras.losses.sparse_categorical_crossentropy(
                ctl.replica.positions(outputs["image"]), logits, from_logits=True)

    Call it on every replica, in `preprocess`, `forward`, `per_example_loss` or `update_metrics`, and
    not inside of a conditional, a loop or a `tf.function` of your own. The gradient of a row is the sum
    of the gradients of all replicas' losses with respect to it, so the update is the same as on one
    replica with all rows.

    Args:
        values: a tensor of shape [rows, ...], or a nested structure of them: one entry per row of
            this replica's batch, or those of `ctl.replica.views`. Floats, integers or bools; 16-bit
            floats are gathered unchanged, and their gradients are summed in float32.

    Returns:
        The same structure with tensors of shape [all rows, ...], or [views x all rows, ...], equal on
        every replica. Their shape is static if the per-replica shapes are static and the batch has no
        row mask.

    Raises:
        UsageError: a value has another number of rows than the batch; or the rows of the global batch
            cannot be read here, because of accumulation, logical shards or runtime.xla=gradients.
    """
    checked = [_check_rows(value, "all_gather") for value in tf.nest.flatten(values)]
    tensors, folds = zip(*checked, strict=True) if checked else ((), ())
    mask = row_mask.current_mask()
    if mask is None:
        gathered = _concatenate([*tensors])
    else:
        *gathered, mask = _concatenate([*tensors, mask])
        gathered = [tf.boolean_mask(rows, mask > 0) for rows in gathered]
    pairs = zip(gathered, folds, strict=True)
    return tf.nest.pack_sequence_as(values, [f.entries(x) if f != Fold() else x for x, f in pairs])


def positions(rows: Nest) -> tf.Tensor:
    """Returns the positions of this replica's rows among the rows that `all_gather` returns.

        scores = queries @ tf.transpose(ctl.replica.all_gather(items))    # [rows, all rows]
        labels = ctl.replica.positions(queries)                           # the item of each query

    Args:
        rows: any tensor of shape [rows, ...] with one entry per row of this replica's batch, or with the
            entries of `ctl.replica.views`.

    Returns:
        int32, one for each entry. Padding has the position of an existing row, so that it is a valid
        index.
    """
    tensor, fold = _check_rows(rows, "positions")
    count = _row_count(tensor)
    first, total = row_mask.row_range(count)
    places = first + tf.range(count)
    mask = row_mask.current_mask()
    if mask is not None:
        (mask,) = _concatenate([mask])
        exists = tf.cast(mask > 0, tf.int32)
        total = tf.reduce_sum(exists)
        last = tf.maximum(total - 1, 0)
        # Padding at the end of the batch repeats its last row, and gets the position of that row.
        places = tf.gather(tf.minimum(tf.cumsum(exists, exclusive=True), last), places)
    rows = row_mask.current()
    if rows is not None:
        rows.trace.positions.extend(symbolic(places))
    if fold == Fold():
        return places
    views = tf.range(fold.views)[:, tf.newaxis] * total + places[:, tf.newaxis, tf.newaxis]
    return fold.entries(views * fold.per_row + tf.range(fold.per_row))


def _concatenate(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Concatenates the rows of all replicas, including padding."""
    if replicas.replica_context() is None:
        return [row_mask.record_global(tensor) for tensor in tensors]
    count = _row_count(tensors[0])
    first, total = row_mask.row_range(count)
    slots = [_fill_slot(_as_summed(tensor), first, total) for tensor in tensors]
    results = []
    for tensor, value in zip(tensors, _sum(slots), strict=True):
        if value.dtype != _SUMMED_AS[tensor.dtype]:
            value = tf.bitcast(value, tf.int64)
        # The reduction loses the static shape. The gradient of the reshape is dense: otherwise, user
        # code that selects rows (tf.gather) would reduce a sparse gradient here.
        shape = tf.concat([[total], tf.shape(tensor)[1:]], axis=0)
        results.append(tf.cast(tf.reshape(value, shape), tensor.dtype))
    return results


def _as_summed(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in a dtype that the strategy can sum to zeros."""
    tensor = tf.cast(tensor, _SUMMED_AS[tensor.dtype])
    if tensor.dtype == tf.int64 and strategies.spec_of(tf.distribute.get_strategy()).tpu:
        return tf.bitcast(tensor, tf.int32)  # a TPU sums no 64-bit integers, but both of its halves
    return tensor


def _fill_slot(tensor: tf.Tensor, first: tf.Tensor, total: int | tf.Tensor) -> tf.Tensor:
    """Turns [rows, ...] into [all rows, ...], with zeros for the rows of the other replicas.

    The SUM of the replicas' results adds zeros to one number, which is exact in any order. Unlike
    `tf.distribute.ReplicaContext.all_gather`, this exchanges no shapes if they are static.
    """
    if isinstance(total, int):  # the replicas have equally many rows
        table = replicas.own_slot(tensor)
        return tf.reshape(table, tf.concat([[total], tf.shape(tensor)[1:]], axis=0))
    after = total - first - _row_count(tensor)
    return tf.pad(tensor, [[first, after], *[[0, 0]] * (tensor.shape.rank - 1)])


def _sum(values: list[tf.Tensor]) -> list[tf.Tensor]:
    try:
        return replicas.sum_over_replicas(values)
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
    raise UsageError(
        "ctl.replica.all_gather cannot communicate inside of a conditional, a loop or a tf.function of "
        "your own: call it outside of them."
    )


def _check_rows(value: Any, function: str) -> tuple[tf.Tensor, Fold]:
    """Returns the value with the rows on axis 0, and how it held them.

    Raises:
        UsageError: its rows are not those of the batch.
    """
    name = f"ctl.replica.{function}"
    row_mask.require_all(name)
    rows = row_mask.current()
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise UsageError(f"{name} got a {type(value).__name__}: convert it to a dense tensor.")
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype not in _SUMMED_AS:
        raise UsageError(
            f"{name} got dtype {tensor.dtype.name}, but requires floats, integers or bools."
        )
    count = None if rows is None else rows.count
    static = count if isinstance(count, int) else None
    is_known = count is None or not tensor.shape.rank or tensor.shape[0] == static is not None
    fold = (None if is_known else find_fold(tensor, count)) or Fold()
    entries = None if static is None else static * fold.views * fold.per_row
    if not tensor.shape.rank or not tensor.shape[:1].is_compatible_with([entries]):
        expected = "rows" if static is None else static
        raise UsageError(
            f"{name} got shape {tensor.shape}, but requires [{expected}, ...]: one entry per row of the "
            "batch (several views of a row on axis 1, or by ctl.replica.views(a, b))."
        )
    if count is None:
        return tensor, fold
    if entries is not None:
        tensor = tf.ensure_shape(tensor, [entries, *tensor.shape[1:]])
    else:
        size = count * fold.views * fold.per_row
        check = tf.debugging.assert_equal(tf.shape(tensor)[0], size, f"{name}: one entry per row.")
        with tf.control_dependencies([check]):
            tensor = tf.identity(tensor)
    return (tensor if fold == Fold() else fold.by_row(tensor, count)), fold


def _row_count(tensor: tf.Tensor) -> int | tf.Tensor:
    return tensor.shape[0] if tensor.shape[0] is not None else tf.shape(tensor)[0]
