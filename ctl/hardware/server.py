"""Runs a worker or parameter server, which executes the functions that the chief sends to it."""

import time

from ctl.errors import print_line
from ctl.hardware import rendezvous
from ctl.hardware.cluster import Cluster
from ctl.hardware.quiet import hold_back_stderr

_POLL_SECONDS = 1.0
_MAX_MISSED_POLLS = 10  # a short interruption of the network must not end the process


def serve(cluster: Cluster, *, start_timeout: float) -> None:
    """Runs TensorFlow's server until the chief has ended.

    The server has no method that waits for the end of the chief (`Server.join` never returns), so this
    process polls the chief's port.

    Args:
        cluster: the processes of the run; this one is a worker or a parameter server.
        start_timeout: seconds to wait for all processes to start.
    """
    import tensorflow as tf

    rendezvous.wait_for_others(cluster, timeout=start_timeout, print_line=print_line)
    with hold_back_stderr():  # gRPC logs each connection
        server = tf.distribute.Server(
            tf.train.ClusterSpec(cluster.spec()), job_name=cluster.role, task_index=cluster.index
        )
        print_line(f"{cluster.name} serves at {server.target.removeprefix('grpc://')}.")
        missed_polls = 0
        while missed_polls < _MAX_MISSED_POLLS:
            time.sleep(_POLL_SECONDS)
            reachable = rendezvous.is_listening(cluster.addresses["chief"][0])
            missed_polls = 0 if reachable else missed_polls + 1
