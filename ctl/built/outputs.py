"""Puts the outputs of parts of a batch together, by their rows."""

from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from ctl.data.source import Nest
from ctl.errors import UsageError, type_name


def concatenate(parts: Sequence[Nest], rows: Sequence[int | tf.Tensor], function: str) -> Nest:
    """Returns the outputs of all micro-batches of a replica.

    Args:
        parts: the outputs of each micro-batch, structures of tensors, numbers and None.
        rows: the number of rows of each micro-batch.
        function: what returned the outputs, for messages.

    Returns:
        The same structure. A tensor has the rows of all micro-batches, and None stays None. A scalar
        has one entry per micro-batch, if there are several.

    Raises:
        UsageError: one of them cannot be put together.
    """
    flat = [tf.nest.flatten(part) for part in parts]
    values = []
    for i, own in enumerate(zip(*flat, strict=True)):
        try:
            values.append(_concatenate(own, rows))
        except (TypeError, ValueError):
            is_tensor = hasattr(own[0], "shape")
            raise UsageError(
                f"{function} returned {f'shape {own[0].shape}' if is_tensor else type_name(own[0])} for "
                f"{list(_names(parts[0]))[i]}, but outputs=True returns tensors with one entry per row "
                "of each micro-batch, scalars and None: return it as one of them, or leave it out."
            ) from None
    return tf.nest.pack_sequence_as(parts[0], values)


def _concatenate(parts: Sequence[Nest], rows: Sequence[int | tf.Tensor]) -> Nest:
    if all(part is None for part in parts):
        return None
    is_composite = isinstance(parts[0], tf.RaggedTensor | tf.SparseTensor)
    tensors = list(parts) if is_composite else [tf.convert_to_tensor(part) for part in parts]
    if len(tensors) == 1:
        return tensors[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, tensors)
    if tensors[0].shape.rank == 0:
        return tf.stack(tensors)
    for shape, count in zip([tensor.shape for tensor in tensors], rows, strict=True):
        # A static size is not that of rows whose number is known later.
        if shape.rank is not None and shape[0] not in (None, count):
            raise ValueError(f"{shape} does not have {count} rows")
    return tf.concat(tensors, 0)


def _names(value: Nest, place: str = "outputs") -> Iterator[str]:
    """Yields the place of each value, in the order of `tf.nest.flatten`."""
    if not tf.nest.is_nested(value):
        yield place
        return
    items = sorted(value.items()) if isinstance(value, Mapping) else enumerate(value)
    for key, each in items:
        yield from _names(each, f"{place}[{key!r}]")
