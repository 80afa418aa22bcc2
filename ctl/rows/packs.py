"""The packs in which replicas send the tensors of one all-reduce.

TensorFlow's collectives concatenate the tensors of a call, by default all of them into one message, and
split the sum: for the gradients of a step, two or three more copies of the parameters. Packs bound these
copies. A pack is also sent as soon as the backward pass has computed its own gradients.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ctl.hardware import strategies

# A pack ends as soon as it exceeds this number of bytes. Between processes on CPUs, larger packs are
# slower, and smaller ones were not faster with four workers when they were measured.
BYTES = 32 * 2**20
# Copies of a pack that exist at a time, at most: concatenated, received, and split. Measured between
# processes on CPUs (benchmarks/replica_memory.py).
_COPIES = 3


def size(strategy: tf.distribute.Strategy) -> int:
    """Returns the bytes above which a pack ends, which a strategy may set itself."""
    return strategies.bucket_bytes(strategy) or BYTES


def options_for(
    tensors: Sequence[tf.Tensor | tf.IndexedSlices],
) -> Any:
    """Returns the options of an all-reduce of some tensors; call it in a replica context."""
    dense = (each for each in tensors if not isinstance(each, tf.IndexedSlices))
    # TensorFlow makes no packs of tensors of unknown shapes, and would log a warning.
    known = all(each.shape.is_fully_defined() for each in dense)
    pack = size(tf.distribute.get_strategy()) if known else 0
    return tf.distribute.experimental.CommunicationOptions(bytes_per_pack=pack)


def buffer_bytes(strategy: tf.distribute.Strategy, sizes: Sequence[int]) -> int:
    """Returns the bytes that the all-reduce of tensors needs in addition to the tensors themselves.

    Args:
        strategy: the strategy.
        sizes: the bytes of the tensors, in the order of the call.
    """
    if strategy.num_replicas_in_sync == 1:
        return 0
    # `bytes_per_pack` has no effect on the algorithms that `runtime.all_reduce.algorithm` may choose for
    # MirroredStrategy: one message, or one for each tensor.
    operations = getattr(strategy.extended, "_cross_device_ops", None)
    limit = size(strategy)
    if isinstance(
        operations, tf.distribute.NcclAllReduce | tf.distribute.HierarchicalCopyAllReduce
    ):
        limit = sum(sizes)
    elif isinstance(operations, tf.distribute.ReductionToOneDevice):
        limit = 0
    return _COPIES * max((sum(sizes[i] for i in pack) for pack in split(sizes, limit)), default=0)


def split(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Returns the numbers of the tensors of each pack, beginning with the last, as TensorFlow does.

    Args:
        sizes: the bytes of the tensors.
        limit: a pack ends as soon as it exceeds this number of bytes.
    """
    packs: list[list[int]] = []
    for i in reversed(range(len(sizes))):
        if not packs or sum(sizes[each] for each in packs[-1]) > limit:
            packs.append([])
        packs[-1].append(i)
    return packs
