"""Reports the loss of another process of the run in one line instead of TensorFlow's many."""

from collections.abc import Iterator
import contextlib
import re

from ctl.errors import LostWorker
from ctl.hardware.cluster import Cluster, task_name

_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")


@contextlib.contextmanager
def report_lost_worker(cluster: Cluster | None) -> Iterator[None]:
    """Turns the error of a broken collective into `LostWorker`.

    Args:
        cluster: the processes of the run; None for a run of one process, whose errors are not changed.

    Raises:
        LostWorker: a collective failed because another process has ended.
    """
    try:
        yield
    except Exception as error:
        if cluster is None or not _is_lost_connection(error):
            raise
        raise LostWorker(
            f"{cluster.name} stops, because {_find_lost_tasks(cluster, str(error))} has ended or cannot "
            "be reached: check it and the network, then start all processes again to continue from the "
            "last checkpoint."
        ) from None


def _is_lost_connection(error: Exception) -> bool:
    import tensorflow as tf

    # The error of a broken connection depends on what this process was doing: sending, receiving,
    # waiting for a peer, or being informed of the failure by the coordination service.
    kinds = (
        tf.errors.UnavailableError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
    )
    # Collectives after the first failure have this text, whatever their error code is.
    aborted = "Collective ops is aborted" in str(error)
    return isinstance(error, kinds) or (isinstance(error, tf.errors.OpError) and aborted)


def _find_lost_tasks(cluster: Cluster, message: str) -> str:
    """Returns the names of the other processes that TensorFlow's message mentions."""
    mentioned = {task_name(role, int(index)) for role, index in _TASK.findall(message)}
    if "CoordinationService/Heartbeat" in message:  # heartbeats go to the first process
        mentioned.add(cluster.members()[0][0])
    return ", ".join(sorted(mentioned & set(cluster.others()))) or "another process"
