"""Builds the strategies of several processes, once all of them have started."""

import contextlib
import math
import os
from typing import Any

import tensorflow as tf

from ctl.hardware import rendezvous
from ctl.hardware.cluster import Cluster
from ctl.hardware.quiet import hold_back_stderr
from ctl.hardware.strategies import StrategyOptions
from ctl.private.tensorflow import context, coordination_config_pb2

_THREADS = 4  # inter-op threads that suffice to start collectives during the backward pass


def build_multi_worker_mirrored(devices: list[str], options: StrategyOptions) -> Any:
    """Builds a strategy of one replica on each device of all workers."""
    resolver = _wait_and_resolve(options)
    assert options.cluster is not None
    _configure_heartbeats(options.cluster, options.heartbeat_timeout)
    if options.bucket_mib:
        reserve_threads()
    implementations = tf.distribute.experimental.CommunicationImplementation
    communication = tf.distribute.experimental.CommunicationOptions(
        implementation=getattr(implementations, options.algorithm.upper()),
        bytes_per_pack=math.ceil(options.bucket_mib * 2**20),
        timeout_seconds=options.timeout or None,
    )
    with hold_back_stderr():  # gRPC logs each connection
        return tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=resolver, communication_options=communication
        )


def _configure_heartbeats(cluster: Cluster, timeout: float) -> None:
    """Sets the timeout of TensorFlow's coordination service, before the strategy is built.

    Each process sends a heartbeat to the first process every `timeout` / 2 seconds. With TensorFlow's
    default timeout of 10 s, an interruption of the network of five seconds would end the run.
    """
    current = context.context()
    if current.coordination_service is not None:
        return
    # As in MultiWorkerMirroredStrategy, which configures the service only if nothing else has.
    jobs = [role for role in ("chief", "worker") if role in cluster.addresses]
    current.configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{jobs[0]}/replica:0/task:0",
        heartbeat_timeout_in_ms=round(1000 * timeout),
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(cluster.addresses[job]))
            for job in jobs
        ],
    )


def build_parameter_server(devices: list[str], options: StrategyOptions) -> Any:
    """Builds the strategy of the chief of parameter servers."""
    resolver = _wait_and_resolve(options, serving=True)
    partitioner = None  # a variable is placed on one server, in round-robin order
    if options.shard_mib:
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=int(options.shard_mib * 2**20),
            max_shards=resolver.cluster_spec().num_tasks("ps"),
        )
    with hold_back_stderr():
        return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)


def _wait_and_resolve(options: StrategyOptions, *, serving: bool = False) -> Any:
    """Waits for the processes of the cluster, and returns TensorFlow's resolver of it."""
    assert options.cluster is not None  # selection.resolve_name has rejected a missing cluster
    rendezvous.wait_for_others(options.cluster, timeout=options.start_timeout, serving=serving)
    # The resolver that reads TF_CONFIG itself would not know the cluster of an Indexed Job.
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(options.cluster.spec()),
        task_type=options.cluster.role,
        task_id=options.cluster.index,
        rpc_layer="grpc",
    )


def reserve_threads() -> None:
    """Gives TensorFlow enough threads to start collectives while the backward pass runs.

    A collective starts in a thread of the inter-op pool, which also runs the operations. By default the
    pool has one thread per core, so a process on one core would start no collective before the backward
    pass has ended.
    """
    pool = tf.config.threading
    if pool.get_inter_op_parallelism_threads() == 0 and len(os.sched_getaffinity(0)) < _THREADS:
        with contextlib.suppress(RuntimeError):  # the config file has used TensorFlow already
            pool.set_inter_op_parallelism_threads(_THREADS)
