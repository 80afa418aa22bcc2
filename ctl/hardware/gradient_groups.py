"""Groups of gradients, each of which is reduced while the backward pass computes the next one."""

from collections.abc import Sequence
import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

_THREADS = 4  # inter-op threads that suffice to start collectives during the backward pass


def group_sizes(sizes: Sequence[int], bucket: int) -> list[int]:
    """Returns the sizes of the groups in which tensors of one dtype are reduced.

    TensorFlow's `CollectiveAllReduce` begins with the last tensor, because the backward pass computes
    the gradients of the last layer first. It ends a group as soon as the group exceeds the bucket. Every
    process has the same tensors, and so the same groups.

    Args:
        sizes: bytes of each tensor, in the order in which the variables were created.
        bucket: `runtime.all_reduce.bucket_mib` in bytes; 0 for one group.

    Returns:
        Bytes of each group, in the order in which the groups are reduced.
    """
    groups: list[int] = []
    for size in reversed(sizes):
        if groups and (not bucket or groups[-1] <= bucket):
            groups[-1] += size
        else:
            groups.append(size)
    return groups


def bucket_bytes(strategy: "tf.distribute.Strategy") -> int:
    """Returns the bytes above which a strategy ends a group; 0 if it has only one group."""
    # Strategies of one process may have the attribute too, with the default value.
    options = getattr(strategy.extended, "_communication_options", None)
    return options.bytes_per_pack if options else 0


def reserve_threads() -> None:
    """Gives TensorFlow enough threads to start collectives while the backward pass runs.

    A collective starts in a thread of the inter-op pool, which also runs the operations. By default the
    pool has one thread per core, so a process on one core would start no collective before the backward
    pass has ended.
    """
    import tensorflow as tf

    pool = tf.config.threading
    if pool.get_inter_op_parallelism_threads() == 0 and len(os.sched_getaffinity(0)) < _THREADS:
        with contextlib.suppress(RuntimeError):  # the config file has used TensorFlow already
            pool.set_inter_op_parallelism_threads(_THREADS)
