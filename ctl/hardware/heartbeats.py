"""Configures how long a process of a run may be unreachable before it counts as lost."""

from ctl.hardware.cluster import Cluster


def configure_heartbeats(cluster: Cluster, *, timeout: float) -> None:
    """Sets the timeout of TensorFlow's coordination service; call it before the strategy is built.

    Each process sends a heartbeat to the first process every `timeout` / 2 seconds. With TensorFlow's
    default timeout of 10 s, an interruption of the network of five seconds would end the run.

    Args:
        cluster: the processes of a multi-worker strategy.
        timeout: seconds without a heartbeat after which a process counts as lost.
    """
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.eager import context

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
