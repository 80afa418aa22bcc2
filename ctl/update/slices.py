"""Reduced gradients of which each replica keeps its slice only (`optimizer.shard_state=gradients`).

A gradient of an update is a complete tensor, a `tf.IndexedSlices` of the rows of all replicas, or a
`Slice`. What reads all elements of a gradient, such as a norm, sums over the replicas by `replace`.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import tensorflow as tf


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


def replace(gradients: Sequence[Any], measure: Callable[[tf.Tensor], tf.Tensor]) -> list[Any]:
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
    replaced = zip(gradients, replace(gradients, measure), strict=True)
    return tf.add_n([new if isinstance(old, Slice) else measure(new) for old, new in replaced])
