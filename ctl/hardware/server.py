"""What the workers and parameter servers of a coordinator do: they wait to be used."""

import time

from ctl.errors import print_line
from ctl.hardware import cluster
from ctl.hardware.cluster import Cluster
from ctl.hardware.quiet import quiet_stderr

_LOOK = 1.0  # seconds between two looks for the chief
_GONE = 10  # looks in a row that do not find it


def serve(own: Cluster, *, start_timeout: float) -> None:
    """Serves a chief until it has gone.

    Args:
        own: this process' place, a worker or a parameter server.
        start_timeout: seconds to wait for all processes to start.
    """
    import tensorflow as tf

    cluster.wait_for_others(own, limit=start_timeout, print_line=print_line)
    spec = tf.train.ClusterSpec({role: list(tasks) for role, tasks in own.addresses.items()})
    with quiet_stderr():  # it tells of each connection
        server = tf.distribute.Server(
            spec, job_name=own.role, task_index=own.index, protocol="grpc", start=True
        )
        print_line(f"{own.name} serves at {server.target.removeprefix('grpc://')}.")
        missed = 0
        while missed < _GONE:
            time.sleep(_LOOK)
            missed = 0 if cluster.listens(own.addresses["chief"][0]) else missed + 1
