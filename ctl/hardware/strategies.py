"""The table of strategies: what each one is for, how it is built, and which options it reads.

A new strategy is a builder function and an entry of `STRATEGIES`. `hardware.selection` chooses the
entry for a config.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import math
import operator
import os
from typing import TYPE_CHECKING, Any

from ctl.errors import UsageError
from ctl.hardware import engines, rendezvous, tpu
from ctl.hardware.cluster import Cluster
from ctl.hardware.devices import replica_devices
from ctl.hardware.quiet import hold_back_stderr

if TYPE_CHECKING:
    import tensorflow as tf

CONFIG_KEYS = {  # field of StrategyOptions -> key in config.runtime
    "logical_devices": "logical_devices",
    "devices": "devices",
    "algorithm": "all_reduce.algorithm",
    "bucket_mib": "all_reduce.bucket_mib",
    "timeout": "all_reduce.timeout",
    "start_timeout": "cluster.start_timeout",
    "heartbeat_timeout": "cluster.heartbeat_timeout",
    "shard_mib": "cluster.shard_mib",
    "tpu": "tpu",
}
ALGORITHMS = ("auto", "nccl", "ring", "hierarchical_copy", "one_device")


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """The options of `config.runtime` that strategies read, and the cluster.

    Attributes:
        logical_devices: number of logical devices to split the first GPU into, or the CPU of a
            machine without a GPU; 0 uses the devices of the machine as they are.
        devices: the devices to use, such as ("GPU:0", "GPU:2"); empty for all.
        algorithm: the all-reduce algorithm, one of `ALGORITHMS`.
        bucket_mib: processes reduce their gradients in groups, each of which ends as soon as it
            exceeds this number of MiB (see `group_sizes`); 0 for one group.
        timeout: seconds that a collective between processes may take; 0 for no limit.
        start_timeout: seconds to wait for the other processes to start.
        heartbeat_timeout: seconds until an unreachable process counts as lost.
        shard_mib: parameter servers split variables into shards of at least this size, in MiB; 0
            splits none.
        tpu: name, full resource name or address of a TPU; "" for a TPU of this machine.
        cluster: the processes of the run; None for a run of one process.
    """

    logical_devices: int = 0
    devices: tuple[str, ...] = ()
    algorithm: str = "auto"
    bucket_mib: float = 0.0
    timeout: float = 0.0
    start_timeout: float = 600.0
    heartbeat_timeout: float = 30.0
    shard_mib: float = 0.0
    tpu: str = ""
    cluster: Cluster | None = None

    @classmethod
    def from_config(cls, runtime: Any, environment: Mapping[str, str]) -> "StrategyOptions":
        """Reads the options from `config.runtime` and the cluster from environment variables."""
        values = {name: operator.attrgetter(key)(runtime) for name, key in CONFIG_KEYS.items()}
        values["devices"] = tuple(values["devices"])
        return cls(**values, cluster=engines.from_environment(environment))


@dataclasses.dataclass(frozen=True)
class StrategySpec:
    """One entry of the table.

    Attributes:
        summary: the purpose, in a few words.
        type: the name of the class in `tf.distribute`; "" for TensorFlow's default strategy.
        build: (devices, options) -> `tf.distribute.Strategy`.
        scope: the devices passed to `build`: "one" or "all" of those selected; "own" passes none to a
            strategy that detects its devices itself.
        reads: the fields of `StrategyOptions` that have an effect.
        algorithms: the all-reduce algorithms that the strategy has, in addition to "auto".
        multi_process: whether the strategy runs in several processes.
        coordinated: whether a chief schedules the steps on workers, which update asynchronously.
        remote: whether the steps run on hosts that do not run this program: they cannot call its
            Python functions, write its files or read its clock.
        central: whether the variables are on another device than the replicas.
        io_device: the device that reads and writes checkpoints; "" for the variables' hosts.
        tpu: whether the replicas are cores of a TPU, which has no float64 and no conditional update.
    """

    summary: str
    type: str
    build: Callable[[list[str], StrategyOptions], Any]
    scope: str
    reads: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    multi_process: bool = False
    coordinated: bool = False
    remote: bool = False
    central: bool = False
    io_device: str = ""
    tpu: bool = False

    @property
    def replica_values(self) -> bool:
        """Whether each replica holds variables, in which it can keep values of its own."""
        return not (self.central or self.remote)


def spec_of(strategy: "tf.distribute.Strategy") -> StrategySpec:
    """Returns the entry of `STRATEGIES` of any strategy, including one built without the table."""
    return STRATEGIES[strategy_name(strategy)]


def strategy_name(strategy: "tf.distribute.Strategy") -> str:
    """Returns the name in `STRATEGIES` of any strategy, including one built without the table."""
    import tensorflow as tf

    for name, spec in STRATEGIES.items():
        # isinstance also recognizes subclasses, such as the SliceStrategy of --mode=aot_compile.
        if spec.type and isinstance(strategy, operator.attrgetter(spec.type)(tf.distribute)):
            return name
    return "default"


def uses_cpu_collectives(strategy: "tf.distribute.Strategy") -> bool:
    """Returns whether a strategy reduces between processes by TensorFlow's collectives on CPUs.

    They support float16, float32, float64, int32 and int64; not bfloat16.
    """
    return (
        strategy_name(strategy) == "multi_worker_mirrored"
        and strategy.num_replicas_in_sync > 1
        and replica_devices(strategy)[0].startswith("CPU")
    )


def _build_default(devices: list[str], options: StrategyOptions) -> Any:
    import tensorflow as tf

    return tf.distribute.get_strategy()  # outside of any scope: TensorFlow's default strategy


def _build_one_device(devices: list[str], options: StrategyOptions) -> Any:
    import tensorflow as tf

    return tf.distribute.OneDeviceStrategy(f"/{devices[0]}")


def _build_mirrored(devices: list[str], options: StrategyOptions) -> Any:
    import tensorflow as tf

    # MirroredStrategy's default collectives abort when one process builds strategies of different
    # sizes, as tests and notebooks do ("joining a group with size 4, but that group has size 2").
    # Logical devices of one chip gain nothing from collectives, so those reduce on one device.
    # Between physical GPUs the default, NCCL, is the fastest.
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    share_chip = devices[0].startswith("CPU") or num_gpus < len(devices)
    cross_device_ops: Any = None
    if options.algorithm == "nccl":
        if share_chip:
            raise UsageError(
                "runtime.all_reduce.algorithm=nccl requires one physical GPU per replica, but the "
                f"replicas are on {', '.join(devices)}: set it to auto."
            )
        cross_device_ops = tf.distribute.NcclAllReduce()
    elif options.algorithm == "hierarchical_copy":
        cross_device_ops = tf.distribute.HierarchicalCopyAllReduce()
    elif options.algorithm == "one_device" or share_chip:
        cross_device_ops = tf.distribute.ReductionToOneDevice(accumulation_fn=_add_in_order)
    return tf.distribute.MirroredStrategy(
        [f"/{device}" for device in devices], cross_device_ops=cross_device_ops
    )


def _build_central_storage(devices: list[str], options: StrategyOptions) -> Any:
    import tensorflow as tf

    # The default of `parameter_device` is the CPU only if there are several compute devices.
    strategy = tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=[f"/{device}" for device in devices], parameter_device="/CPU:0"
    )
    # The constructor has no argument for it.
    strategy.extended._cross_device_ops.accumulation_fn = _add_in_order
    return strategy


def _add_in_order(values: Sequence[Any]) -> Any:
    """Returns the sum of the replicas' tensors, added in the order of the replicas.

    `tf.add_n` alone gives the sum of three or more tensors other last bits in some runs, because the
    order of its inputs is not fixed. Its kernel begins with the first input whose memory it may reuse,
    which depends on whether other operations that read the input have already run. `Snapshot` returns
    memory that no other operation reads. It copies its input only if another operation may still read
    it. The optimizer of graphs sorts the inputs of `add_n` by name, and without `Snapshot` it merges the
    sum of two replicas with a sum in one of them.
    """
    import tensorflow as tf

    with tf.name_scope("add_in_order"):
        own = [
            tf.raw_ops.Snapshot(input=value, name=f"replica_{replica:06d}")
            for replica, value in enumerate(values)
        ]
        return tf.add_n(own)


def _build_multi_worker_mirrored(devices: list[str], options: StrategyOptions) -> Any:
    import tensorflow as tf

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
    from ctl.private.tensorflow import context, coordination_config_pb2

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


def _build_parameter_server(devices: list[str], options: StrategyOptions) -> Any:
    import tensorflow as tf

    resolver = _wait_and_resolve(options, serving=True)
    partitioner = None  # a variable is placed on one server, in round-robin order
    if options.shard_mib:
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=int(options.shard_mib * 2**20),
            max_shards=resolver.cluster_spec().num_tasks("ps"),
        )
    with hold_back_stderr():
        return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)


def _build_tpu(devices: list[str], options: StrategyOptions) -> Any:
    return tpu.build(options.tpu)


def _wait_and_resolve(options: StrategyOptions, *, serving: bool = False) -> Any:
    """Waits for the processes of the cluster, and returns TensorFlow's resolver of it."""
    import tensorflow as tf

    assert options.cluster is not None  # selection.resolve_name has rejected a missing cluster
    rendezvous.wait_for_others(options.cluster, timeout=options.start_timeout, serving=serving)
    # The resolver that reads TF_CONFIG itself would not know the cluster of an Indexed Job.
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(options.cluster.spec()),
        task_type=options.cluster.role,
        task_id=options.cluster.index,
        rpc_layer="grpc",
    )


STRATEGIES: dict[str, StrategySpec] = {
    "default": StrategySpec(
        "one replica without a strategy, on the device that TensorFlow chooses",
        "",
        _build_default,
        "own",
    ),
    "one_device": StrategySpec(
        "one replica on the first GPU, or on the CPU",
        "OneDeviceStrategy",
        _build_one_device,
        "one",
        reads=("logical_devices", "devices"),
    ),
    "mirrored": StrategySpec(
        "one replica per device of this machine",
        "MirroredStrategy",
        _build_mirrored,
        "all",
        reads=("logical_devices", "devices", "algorithm"),
        algorithms=("nccl", "hierarchical_copy", "one_device"),
    ),
    "central_storage": StrategySpec(
        "one replica per device of this machine, with a single copy of the variables on the CPU",
        "experimental.CentralStorageStrategy",
        _build_central_storage,
        "all",
        reads=("logical_devices", "devices"),
        central=True,
    ),
    "multi_worker_mirrored": StrategySpec(
        "one replica per device of several processes, on one machine or more",
        "MultiWorkerMirroredStrategy",
        _build_multi_worker_mirrored,
        "own",
        reads=("algorithm", "bucket_mib", "timeout", "start_timeout", "heartbeat_timeout"),
        algorithms=("nccl", "ring"),
        multi_process=True,
    ),
    "tpu": StrategySpec(
        "one replica per core of a TPU slice",
        "TPUStrategy",
        _build_tpu,
        "own",
        reads=("tpu",),
        remote=True,
        io_device="/job:localhost",  # the hosts of a remote TPU have no disk of the run
        tpu=True,
    ),
    "parameter_server": StrategySpec(
        "workers that asynchronously update variables on parameter servers",
        "ParameterServerStrategy",
        _build_parameter_server,
        "own",
        reads=("start_timeout", "shard_mib"),
        multi_process=True,
        coordinated=True,
        remote=True,
        central=True,
    ),
}
NAMES = ("auto", *STRATEGIES)


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
