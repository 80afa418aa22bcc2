"""Tells that another process of the run has gone, in one line instead of TensorFlow's many."""

from collections.abc import Iterator
import contextlib
import re

import tensorflow as tf

from ctl.errors import LostWorker
from ctl.hardware.cluster import Cluster, task_name

_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")


@contextlib.contextmanager
def report_lost_worker(cluster: Cluster | None) -> Iterator[None]:
    """Turns the failure of a collective into a `LostWorker`.

    Args:
        cluster: the processes of the run; None for a run in one, whose errors pass as they are.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if cluster is None or not _is_lost(error):
            raise
        raise LostWorker(
            f"{cluster.name} stops: {_who(cluster, error.message)} has gone. Start all processes again "
            "to go on from the last checkpoint."
        ) from None


def _is_lost(error: tf.errors.OpError) -> bool:
    return isinstance(error, _LOST) or "Collective ops is aborted" in error.message


def _who(cluster: Cluster, message: str) -> str:
    found = {task_name(role, int(index)) for role, index in _TASK.findall(message)}
    return ", ".join(sorted(found & set(cluster.others()))) or "another process"
