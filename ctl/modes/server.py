"""The workers and parameter servers of a chief run TensorFlow's server until the chief has ended."""

import os
import time

from ctl.errors import print_line
from ctl.hardware import rendezvous
from ctl.hardware.quiet import hold_back_stderr
from ctl.hardware.strategies import StrategyOptions
from ctl.modes import DONE, STOPPED, Arguments, results

_PING_SECONDS = 1.0
_MAX_MISSED_PINGS = 10  # a short interruption of the network must not end the process


def run_server(arguments: Arguments) -> int:
    """Runs TensorFlow's server until the chief has ended.

    The server has no method that waits for the end of the chief (`Server.join` never returns), so this
    process polls the chief's port.

    Returns:
        The exit code: stopped if the run was not complete by then, so that it is started again.
    """
    import tensorflow as tf  # before it waits for the others, so that all start at about the same time

    options = StrategyOptions.from_config(arguments.config.runtime, os.environ)
    cluster = options.cluster
    assert cluster is not None
    rendezvous.wait_for_others(cluster, timeout=options.start_timeout)
    with hold_back_stderr():  # gRPC logs each connection
        server = tf.distribute.Server(
            tf.train.ClusterSpec(cluster.spec()), job_name=cluster.role, task_index=cluster.index
        )
        print_line(f"{cluster.name} serves at {server.target.removeprefix('grpc://')}.")
        missed_pings = 0
        while missed_pings < _MAX_MISSED_PINGS:
            time.sleep(_PING_SECONDS)
            reachable = rendezvous.is_listening(cluster.addresses["chief"][0])
            missed_pings = 0 if reachable else missed_pings + 1
    # A dry run is not repeated, whatever its result: the chief reports it.
    return DONE if arguments.dry_run or results.has_ended(arguments.workdir) else STOPPED
