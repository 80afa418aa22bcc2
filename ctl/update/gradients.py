"""Operations on the gradients of a step: accumulate, unscale, check, clip, apply.

Sparse gradients (`tf.IndexedSlices`, of embeddings) stay sparse, except where they are added to dense
gradients. A gradient that is None (the loss does not depend on the variable) stays None and is excluded
from the update. Reduced gradients may be slices, of which each replica keeps its own only
(`optimizer.shard_state=gradients`): what reads all elements of a gradient, such as a norm, sums over the
replicas by `replace_slices`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from ctl.configs.options import TrainerOptions
from ctl.graphs.assignments import OPTIMIZER_UPDATE
from ctl.graphs.ops import is_compiled
from ctl.keras.precision import Optimizer
from ctl.optimizers import CLIPPING
from ctl.rows import replicas
from ctl.update.snapshot import Snapshot

# Of the check for finite values in a program of XLA.
_SMALL = 2**15  # a gradient with fewer elements is not summed
_ROWS = 2**12  # a gradient is summed over as few of its last axes as leave fewer sums
_PARTS = 64  # XLA merges the computation of fewer than 96 tensors into a kernel


@dataclasses.dataclass(frozen=True)
class Slice:
    """A replica's slice of the gradient of the global batch.

    Attributes:
        values: [length] elements.
        body: the number of the first elements, which no other replica has, with zeros as padding; every
            replica has the others.
    """

    values: tf.Tensor
    body: int

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the elements."""
        return self.values.dtype

    def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> "Slice":
        """Returns the slice of an elementwise function of the gradient."""
        return Slice(function(self.values), self.body)


Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | Slice | None
Transform: TypeAlias = Callable[[list[Gradient], list[tf.Variable]], Sequence[Gradient]]


def accumulate(micro_batches: Sequence[Sequence[Gradient]]) -> list[Gradient]:
    """Sums the gradients of micro-batches.

    Args:
        micro_batches: for each micro-batch, one gradient per variable.

    Returns:
        One sum per variable.
    """
    total = list(micro_batches[0])
    for gradients in micro_batches[1:]:
        total = [_add(one, other) for one, other in zip(total, gradients, strict=True)]
    return total


def unscale(gradients: Sequence[Gradient], loss_scale: tf.Tensor) -> list[Gradient]:
    """Divides reduced gradients by the loss scale."""
    # Divided, because the product with the inverse of a scale that is not a power of two would be
    # rounded twice.
    return [map_values(g, lambda v: v / tf.cast(loss_scale, v.dtype)) for g in gradients]


def find_non_finite(gradients: Sequence[Gradient], loss: tf.Tensor) -> tf.Tensor:
    """Finds the first of the loss and the gradients that is not finite.

    An infinite element or NaN makes the sum of a gradient infinite or NaN. The sum takes one pass and no
    memory. Finite elements whose sum overflows, about 1e38 in float32, count as not finite.

    On a GPU, the kernels of many small sums take longer than the sums. So in a program of XLA, which
    merges operations, small gradients are not summed, large ones are summed by rows, and the elements
    and the sums of many gradients are checked together.

    The loss is checked too, because an infinite loss can leave finite gradients.

    Returns:
        Scalar int64: 0 for the loss, 1 + i for gradient i, and 1 + the number of gradients if all of
        them are finite or None.
    """
    values = replace_slices(gradients, lambda value: tf.reduce_sum(_real(value)))
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in values]
    values = [tf.constant(0.0) if value is None else _real(value) for value in (loss, *values)]
    dtype = _widest(values)
    if not is_compiled():
        flags = tf.math.is_finite(tf.stack([tf.cast(tf.reduce_sum(v), dtype) for v in values]))
        # The first False, since the kernels of argmin return the first of equal minima.
        first = tf.argmin(tf.cast(flags, tf.int32), output_type=tf.int64)
        return tf.where(tf.reduce_all(flags), np.int64(len(values)), first)
    parts = [tf.cast(_shorten(value), dtype) for value in values]
    ends = np.cumsum([part.shape[0] for part in parts], dtype=np.int32)
    firsts = []
    for i in range(0, len(parts), _PARTS):
        numbers = tf.concat(parts[i : i + _PARTS], axis=0)
        positions = tf.range(numbers.shape[0]) + (ends[i - 1] if i else 0)
        firsts.append(tf.reduce_min(tf.where(tf.math.is_finite(numbers), ends[-1], positions)))
    return tf.math.count_nonzero(tf.reduce_min(firsts) >= ends)


def _real(value: tf.Tensor) -> tf.Tensor:
    """Returns real numbers, as many and finite where the elements of a tensor are."""
    if value.dtype.is_complex:
        return tf.math.real(value) + tf.math.imag(value)
    # A sum in 16 bits could overflow.
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value


def _shorten(value: tf.Tensor) -> tf.Tensor:
    """Returns [n] numbers that are finite if all elements of a tensor are; n is static."""
    size, rank = value.shape.num_elements(), value.shape.rank
    if size is None or size >= _SMALL:
        axis = rank or 0
        while axis and not (value.shape[:axis].num_elements() or _ROWS) < _ROWS:
            axis -= 1
        value = tf.reduce_sum(value, axis=range(axis, rank) if axis else None)
    return tf.reshape(value, [value.shape.num_elements()])


def _widest(values: Sequence[tf.Tensor]) -> tf.DType:
    """Returns the widest real dtype of tensors, at least float32."""
    return max((tf.float32, *(v.dtype.real_dtype for v in values)), key=lambda dtype: dtype.size)


def replace_slices(
    gradients: Sequence[Any], measure: Callable[[tf.Tensor], tf.Tensor]
) -> list[Any]:
    """Replaces each slice by a measure of the complete gradient, the same on every replica.

    Call it in a replica context, on every replica. Without slices it adds no operation.

    Args:
        gradients: gradients of any type.
        measure: returns a scalar of the elements of a tensor, which of more elements is the sum; zeros
            add nothing.
    """
    result = list(gradients)
    places = [i for i, each in enumerate(gradients) if isinstance(each, Slice)]
    if places:
        own = [measure(result[i].values[: result[i].body]) for i in places]
        # One dtype, so that one all-reduce sends all of them.
        widest = max((each.dtype for each in own), key=lambda dtype: dtype.size)
        own = tf.stack([tf.cast(each, widest) for each in own])
        context = tf.distribute.get_replica_context()
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(own))
        for i, total in zip(places, tf.unstack(sums), strict=True):
            # Every replica has the rest, which a sum over the replicas would count several times.
            rest = measure(result[i].values[result[i].body :])
            result[i] = total + tf.cast(rest, widest)
    return result


def total(gradients: Sequence[Any], measure: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Returns the sum of a measure over gradients, which are tensors or slices."""
    replaced = zip(gradients, replace_slices(gradients, measure), strict=True)
    return tf.add_n([new if isinstance(old, Slice) else measure(new) for old, new in replaced])


def global_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the square root of the sum of |element|^2, in the widest real dtype of the gradients.

    Args:
        gradients: tensors, variables, `tf.IndexedSlices` or None. Several entries of a sparse gradient
            for one row of the variable are summed first: they are one number of the gradient.
    """
    existing = [_values(sum_rows(gradient)) for gradient in gradients if gradient is not None]
    dtype = _widest(existing)
    existing = _replace_by_norms(existing)
    parts = [part for v in existing for part in _parts(v)]
    # As in tf.linalg.global_norm, which requires one real dtype.
    halves = tf.stack([tf.nn.l2_loss(tf.cast(part, dtype)) for part in parts])
    return tf.sqrt(tf.reduce_sum(halves) * tf.constant(2.0, dtype))


def _replace_by_norms(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Replaces slices by the norms of the complete gradients."""

    def square(value: tf.Tensor) -> tf.Tensor:
        return tf.add_n([tf.reduce_sum(tf.square(part)) for part in _parts(value)])

    squares = zip(gradients, replace_slices(gradients, square), strict=True)
    return [tf.sqrt(new) if isinstance(old, Slice) else old for old, new in squares]


def _values(gradient: tf.Tensor) -> tf.Tensor:
    if isinstance(gradient, Slice):
        return gradient
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.convert_to_tensor(values)


def _parts(value: tf.Tensor) -> list[tf.Tensor]:
    return [tf.math.real(value), tf.math.imag(value)] if value.dtype.is_complex else [value]


def clip(gradients: Sequence[Gradient], options: TrainerOptions) -> list[Gradient]:
    """Clips reduced gradients.

    Rows of a sparse gradient that belong to the same row of the variable are summed first: the norm
    of the unsummed rows would depend on how the batch was split.

    Args:
        gradients: the gradients of the global batch.
        options: the trainer's options, with at most one bound.

    Returns:
        The clipped gradients.
    """
    bound = options.clip_global_norm or options.clip_norm or options.clip_value
    if not bound:
        return list(gradients)
    # tf.clip_by_* would use the norm of the unsummed rows.
    summed = [sum_rows(gradient) for gradient in gradients]
    if options.clip_value:
        return [map_values(g, lambda v: _clip_value(v, bound)) for g in summed]
    if options.clip_global_norm:
        norm = global_norm(summed)
        scale = bound * tf.minimum(1.0 / norm, tf.ones([], norm.dtype) / bound)
        scale += norm - norm  # NaN if the norm is not finite, as in tf.clip_by_global_norm
        return [map_values(g, lambda v: v * tf.cast(scale, v.dtype)) for g in summed]
    norms = _replace_by_norms(summed)
    return [
        g.map(functools.partial(_scale, norm=norm, bound=bound))
        if isinstance(g, Slice)
        else map_values(g, lambda v: _clip_norm(v, bound))
        for g, norm in zip(summed, norms, strict=True)
    ]


def _clip_norm(value: tf.Tensor, bound: float) -> tf.Tensor:
    if not value.dtype.is_complex:
        return tf.clip_by_norm(value, bound)
    return _scale(value, norm=global_norm([value]), bound=bound)


def _scale(value: tf.Tensor, *, norm: tf.Tensor, bound: float) -> tf.Tensor:
    return value * tf.cast(bound / tf.maximum(norm, bound), value.dtype)


def _clip_value(value: tf.Tensor, bound: float) -> tf.Tensor:
    if not value.dtype.is_complex:
        return tf.clip_by_value(value, -bound, bound)
    return value * tf.cast(bound / tf.maximum(tf.abs(value), bound), value.dtype)


def after_all(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns the gradients once all of them are computed, as an all-reduce does.

    Without it, TensorFlow updates a layer while it computes the gradients of earlier layers. On CPUs the
    two compete for the threads of a matrix product, which waits for the slowest of its threads.
    """
    parts: list[tf.Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            parts += [gradient.values, gradient.indices]
        elif gradient is not None:
            parts.append(gradient)
    results = iter(tf.identity_n(parts) if parts else ())

    def after(gradient: Gradient) -> Gradient:
        if isinstance(gradient, tf.IndexedSlices):  # its shape is a constant, and stays one
            return tf.IndexedSlices(next(results), next(results), gradient.dense_shape)
        return None if gradient is None else next(results)

    return [after(gradient) for gradient in gradients]


def apply(
    optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[tf.Variable]
) -> None:
    """Applies reduced gradients to every replica's copy of the variables, without another reduction.

    Args:
        optimizer: a tf_keras optimizer.
        gradients: the gradients of the global batch; None for a variable that stays unchanged.
        variables: the variables, in the same order.
    """
    # The optimizer's own bounds would apply to the unsummed rows of sparse gradients.
    if any(getattr(optimizer, name, None) for name in CLIPPING):
        gradients = [sum_rows(gradient) for gradient in gradients]
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if pairs:
        _build(optimizer, [v for _, v in pairs])
        # Without a second reduction: the sum over N replicas of equal sums would be N times as large.
        # The argument has its old name, because the legacy optimizers accept it too.
        with tf.name_scope(OPTIMIZER_UPDATE):
            optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)


def _sum_all_rows(gradients: Sequence[Gradient]) -> list[Gradient]:
    return [sum_rows(gradient) for gradient in gradients]


def _build(optimizer: Optimizer, variables: Sequence[tf.Variable]) -> None:
    # Before it updates a variable, an optimizer sums equal rows by tf.unique, a loop in XLA. In the
    # dict, because tf_keras would track an attribute.
    for each in optimizers_of(optimizer):
        vars(each)["_deduplicate_sparse_grad"] = _sum_all_rows
    # Outside of the scope of the update, which would be in the names of the slots.
    with tf.name_scope(optimizer.name), tf.init_scope():
        optimizer.build(variables)


def call_unless(
    condition: tf.Tensor,
    function: Callable[..., Any],
    *,
    arguments: Sequence[tf.Tensor],
    compiled: bool = False,
) -> None:
    """Calls a function, as `replicas.merge` does, that assigns variables if a condition is false.

    Args:
        condition: scalar bool, the same on every replica.
        function: called with `arguments` and with `counts`, a scalar bool: whether the condition is
            false. It assigns nothing if `counts` is false.
        arguments: the arguments of `function`, the same on every replica.
        compiled: whether this is part of a program of XLA. On a GPU, such a program waits in each
            conditional until the host has read the condition. So there is none, and `counts` decides.
    """

    # To assign a mirrored variable, tf.distribute merges the replicas, which it rejects inside of a
    # replica's own tf.cond. So the replicas merge first, and one conditional decides for all.
    def decide(strategy: tf.distribute.Strategy, condition: Any, arguments: Any) -> None:
        (first,) = replicas.first(strategy, [condition])

        def call(counts: tf.Tensor) -> None:
            function(*replicas.first(strategy, arguments), counts=counts)

        if compiled:
            call(tf.logical_not(first))
        else:
            tf.cond(first, lambda: None, lambda: call(tf.constant(True)))

    replicas.merge(decide, condition, list(arguments))


def apply_or_skip(
    should_apply: tf.Tensor,
    optimizer: Optimizer,
    gradients: Sequence[Gradient],
    variables: Sequence[tf.Variable],
    *,
    on_skip: Callable[..., None],
    skip_arguments: Sequence[tf.Tensor],
    finite: tf.Tensor,
    afterwards: Callable[[tf.Tensor], None],
    compiled: bool = False,
) -> None:
    """Applies reduced gradients on all replicas, or on none.

    A conditional in the code of each replica would contain the optimizer's collectives, which
    tf.distribute rejects. So the replicas merge, and one conditional decides for all of them.

    Args:
        should_apply: scalar bool, the same on every replica.
        optimizer: a tf_keras optimizer.
        gradients: the gradients of the global batch; None for a variable that stays unchanged.
        variables: the variables, in the same order.
        on_skip: assigns variables if the update is skipped, as the function of `call_unless`.
        skip_arguments: the arguments of `on_skip`, the same on every replica.
        finite: scalar bool, whether the gradients are finite, the same on every replica.
        afterwards: called with `finite`, as `replicas.merge` calls a function.
        compiled: whether this is part of a program of XLA. Then the update is computed in any case,
            and selected without a conditional: see `call_unless`. Sparse gradients still have a
            conditional, because a selection would copy complete tables.
    """
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    existing, targets = [g for g, _ in pairs], [v for _, v in pairs]
    sparse = any(isinstance(g, tf.IndexedSlices) for g in existing)
    selects = compiled and bool(existing) and not sparse
    if selects:
        _apply_and_select(should_apply, optimizer, existing, targets)
        call_unless(should_apply, on_skip, arguments=skip_arguments, compiled=True)

    def decide(
        strategy: tf.distribute.Strategy,
        should_apply: Any,
        finite: Any,
        gradients: Any,
        arguments: Any,
    ) -> None:
        # tf_keras' optimizers apply gradients in a replica context, so `run` enters it again.
        def update() -> None:
            replicas.run(strategy, lambda *new: apply(optimizer, new, targets), tuple(gradients))

        def skip() -> None:
            on_skip(*replicas.first(strategy, arguments), counts=tf.constant(True))

        first, own_finite = replicas.first(strategy, [should_apply, finite])
        if not selects:
            tf.cond(first, update, skip, name=OPTIMIZER_UPDATE)
        # Outside of the conditional, because the loss scale also counts the applied steps.
        afterwards(own_finite)

    replicas.merge(decide, should_apply, finite, existing, list(skip_arguments))


def _apply_and_select(
    should_apply: tf.Tensor,
    optimizer: Optimizer,
    gradients: Sequence[Gradient],
    variables: Sequence[tf.Variable],
) -> None:
    """Applies gradients, and restores all variables if the update is to be skipped."""
    _build(optimizer, variables)
    snapshot = Snapshot([*variables, *optimizer.variables])
    apply(optimizer, gradients, variables)
    with tf.name_scope(OPTIMIZER_UPDATE):
        snapshot.select(should_apply)


def sum_rows(gradient: Gradient) -> Gradient:
    """Returns a sparse gradient with one row per row of the variable; dense gradients unchanged."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, values = gradient.indices, gradient.values
    if getattr(indices, "_ctl_distinct", False):
        return gradient
    if is_compiled() and indices.shape.is_fully_defined():
        # XLA makes a loop of one iteration per index of `tf.unique`, and none of a sort. It sorts the
        # padding of a number of indices that is not static among them.
        order = tf.argsort(indices, stable=True)
        indices, values = tf.gather(indices, order), tf.gather(values, order)
        is_first = tf.concat([tf.fill([1], True), indices[1:] != indices[:-1]], axis=0)
        position = tf.cumsum(tf.cast(is_first, tf.int32)) - 1
        indices = tf.gather(indices, tf.where(is_first)[:, 0])
    else:
        indices, position = tf.unique(indices)
    values = tf.math.unsorted_segment_sum(values, position, tf.size(indices))
    if not tf.executing_eagerly():
        indices._ctl_distinct = True  # an optimizer would sum the rows of clipped gradients again
    return tf.IndexedSlices(values=values, indices=indices, dense_shape=gradient.dense_shape)


def nonzero_rows(gradient: tf.Tensor | tf.IndexedSlices | None) -> Gradient:
    """Returns a gradient as a sparse one with an entry for each row that is not zero, in order."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        summed: tf.IndexedSlices = sum_rows(gradient)
        order, shape = tf.argsort(summed.indices), summed.dense_shape
        values, indices = tf.gather(summed.values, order), tf.gather(summed.indices, order)
    else:
        values, shape = gradient, tf.constant(gradient.shape.as_list(), tf.int64)
        indices = tf.range(gradient.shape[0], dtype=tf.int64)
    axes = range(1, values.shape.rank)
    places = tf.where(tf.reduce_any(tf.not_equal(values, 0), axis=axes))[:, 0]  # NaN is not 0
    indices = tf.gather(indices, places)
    if not tf.executing_eagerly():
        indices._ctl_distinct = True
    return tf.IndexedSlices(tf.gather(values, places), indices, shape)


def _add(one: Gradient, other: Gradient) -> Gradient:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        return tf.IndexedSlices(
            values=tf.concat([one.values, other.values], axis=0),
            indices=tf.concat([one.indices, other.indices], axis=0),
            dense_shape=one.dense_shape,
        )
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def map_values(gradient: Gradient, function: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    """Applies a function to the values of a dense or sparse gradient, and not to None."""
    if gradient is None:
        return None
    if isinstance(gradient, Slice):
        return gradient.map(function)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            values=function(gradient.values),
            indices=gradient.indices,
            dense_shape=gradient.dense_shape,
        )
    return function(gradient)


def elements(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Returns the elements of a gradient that may not be zero."""
    values = sum_rows(gradient)
    return values.values if isinstance(values, tf.IndexedSlices) else values


def modulus(values: tf.Tensor) -> tf.Tensor:
    """Returns real values as they are, and the absolute values of complex ones."""
    return tf.abs(values) if values.dtype.is_complex else values


def optimizers_of(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer without its loss scale, and those that it passes some gradients on to."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [inner, *getattr(inner, "_ctl_groups", ())]
