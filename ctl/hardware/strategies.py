"""config.runtime -> `tf.distribute.Strategy`: one table, a row a strategy.

Importing this loads no TensorFlow, so that a config can be checked by it.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import TYPE_CHECKING, Any

from ctl.errors import UsageError, print_line
from ctl.hardware import cluster, devices, tpu
from ctl.hardware.cluster import Cluster
from ctl.hardware.quiet import quiet_stderr

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Request:
    """What a config asks of its hardware beside the strategy's name.

    Attributes:
        logical_devices: split the first GPU, or the CPU where there is none, into so many devices;
            0 takes the machine's devices as they are.
        devices: which to take, such as ("GPU:0", "GPU:2"); empty for all.
        algorithm: how gradients are reduced: "auto", "nccl", "ring", "hierarchical_copy" or
            "one_device".
        packs: parts that a reduction is cut in.
        timeout: seconds that a reduction between processes may take; 0 for no limit.
        start_timeout: seconds to wait for the other processes to start.
        shard_mib: parameter servers hold a variable in parts of at least so much; 0 for whole ones.
        tpu: name, zone, project or address of a TPU elsewhere; empty for this machine's.
        cluster: the processes of the run, where there are several.
    """

    logical_devices: int = 0
    devices: tuple[str, ...] = ()
    algorithm: str = "auto"
    packs: int = 1
    timeout: float = 0.0
    start_timeout: float = 600.0
    shard_mib: float = 0.0
    tpu: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cluster: Cluster | None = None

    @classmethod
    def of(cls, runtime: Any, environment: Mapping[str, str]) -> "Request":
        """What a config's `runtime` section and the process' environment ask for."""
        return cls(
            logical_devices=runtime.logical_devices,
            devices=tuple(runtime.devices),
            algorithm=runtime.all_reduce.algorithm,
            packs=runtime.all_reduce.packs,
            timeout=runtime.all_reduce.timeout,
            start_timeout=runtime.cluster.start_timeout,
            shard_mib=runtime.cluster.shard_mib,
            tpu={key: value for key, value in runtime.tpu.items() if value},
            cluster=cluster.read(environment),
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One strategy.

    Attributes:
        summary: what it is for, in a few words.
        build: (devices, request) -> strategy.
        takes: "one" or "all" of the machine's devices, or "own" if TensorFlow finds them.
        accepts: the fields of a `Request` that have an effect.
        algorithms: the all-reduce algorithms that it has, beside "auto".
        processes: whether it runs in several processes.
    """

    summary: str
    build: Callable[[list[str], Request], Any]
    takes: str
    accepts: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    processes: bool = False


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A strategy, and why it is the one.

    Attributes:
        strategy: the strategy.
        name: its row in the table.
        why: one line for the person who runs it.
        cluster: the processes of the run, where there are several.
    """

    strategy: "tf.distribute.Strategy"
    name: str
    why: str
    cluster: Cluster | None = None

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what a run writes once."""
        return self.cluster is None or self.cluster.is_chief


def _tpu(devices: list[str], request: Request) -> "tf.distribute.Strategy":
    return tpu.build(**request.tpu)


def _default(devices: list[str], request: Request) -> "tf.distribute.Strategy":
    import tensorflow as tf

    return tf.distribute.get_strategy()


def _one_device(devices: list[str], request: Request) -> "tf.distribute.Strategy":
    import tensorflow as tf

    return tf.distribute.OneDeviceStrategy(f"/{devices[0]}")


def _mirrored(devices: list[str], request: Request) -> "tf.distribute.Strategy":
    import tensorflow as tf

    # The default collectives abort when one process makes strategies of different sizes
    # ("joining a group with size 4, but that group has size 2"), as tests and notebooks do; between
    # devices that share a chip they gain nothing. NCCL stays the choice for physical GPUs.
    shared = devices[0].startswith("CPU") or len(tf.config.list_physical_devices("GPU")) < len(
        devices
    )
    made = {
        "nccl": lambda: tf.distribute.NcclAllReduce(num_packs=request.packs),
        "hierarchical_copy": lambda: tf.distribute.HierarchicalCopyAllReduce(
            num_packs=request.packs
        ),
        "one_device": tf.distribute.ReductionToOneDevice,
        "auto": tf.distribute.ReductionToOneDevice if shared else lambda: None,
    }
    if request.algorithm == "nccl" and shared:
        raise UsageError(
            "runtime.all_reduce.algorithm=nccl reduces between physical GPUs, and the replicas are on "
            f"{', '.join(devices)}: choose auto."
        )
    return tf.distribute.MirroredStrategy(
        [f"/{d}" for d in devices], cross_device_ops=made[request.algorithm]()
    )


def _central_storage(devices: list[str], request: Request) -> "tf.distribute.Strategy":
    import tensorflow as tf

    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=[f"/{d}" for d in devices], parameter_device="/CPU:0"
    )


def _multi_worker_mirrored(devices: list[str], request: Request) -> "tf.distribute.Strategy":
    import tensorflow as tf

    assert request.cluster is not None
    cluster.wait_for_others(request.cluster, limit=request.start_timeout, print_line=print_line)
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=getattr(kinds, request.algorithm.upper()),
        timeout_seconds=request.timeout or None,
    )
    with quiet_stderr():
        return tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=_resolver(request.cluster), communication_options=options
        )


def _parameter_server(devices: list[str], request: Request) -> "tf.distribute.Strategy":
    import tensorflow as tf

    assert request.cluster is not None
    cluster.wait_for_others(request.cluster, limit=request.start_timeout, print_line=print_line)
    partitioner = None
    if request.shard_mib:
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=int(request.shard_mib * 2**20),
            max_shards=len(request.cluster.addresses["ps"]),
        )
    with quiet_stderr():
        return tf.distribute.ParameterServerStrategy(
            _resolver(request.cluster), variable_partitioner=partitioner
        )


STRATEGIES: dict[str, Row] = {
    "default": Row("one replica where TensorFlow puts it, with no strategy", _default, "own"),
    "one_device": Row(
        "one replica on the first GPU, or the CPU",
        _one_device,
        "one",
        accepts=("logical_devices", "devices"),
    ),
    "mirrored": Row(
        "a replica a device, of one machine",
        _mirrored,
        "all",
        accepts=("logical_devices", "devices", "algorithm", "packs"),
        algorithms=("nccl", "hierarchical_copy", "one_device"),
    ),
    "central_storage": Row(
        "a replica a device, the variables once, in the memory of the CPU",
        _central_storage,
        "all",
        accepts=("logical_devices", "devices"),
    ),
    "multi_worker_mirrored": Row(
        "a replica a device of several processes, on one machine or more",
        _multi_worker_mirrored,
        "own",
        accepts=("algorithm", "timeout", "start_timeout"),
        algorithms=("nccl", "ring"),
        processes=True,
    ),
    "tpu": Row("a replica a core of a TPU slice", _tpu, "own", accepts=("tpu",)),
    "parameter_server": Row(
        "workers that update by themselves variables that other processes hold",
        _parameter_server,
        "own",
        accepts=("start_timeout", "shard_mib"),
        processes=True,
    ),
}
NAMES = ("auto", *STRATEGIES)
ALGORITHMS = ("auto", "nccl", "ring", "hierarchical_copy", "one_device")
_KEYS = {
    "logical_devices": "runtime.logical_devices",
    "devices": "runtime.devices",
    "algorithm": "runtime.all_reduce.algorithm",
    "packs": "runtime.all_reduce.packs",
    "timeout": "runtime.all_reduce.timeout",
    "start_timeout": "runtime.cluster.start_timeout",
    "shard_mib": "runtime.cluster.shard_mib",
    "tpu": "runtime.tpu",
}


def resolve_name(name: str, request: Request) -> str:
    """The row that a name comes to as far as it is known without TensorFlow; "auto" may stay.

    Raises:
        UsageError: the name, the request and the cluster cannot go together.
    """
    if name not in NAMES:
        raise UsageError(f"There is no strategy {name!r}: choose one of {', '.join(NAMES)}.")
    own = request.cluster
    several = own is not None and own.size > 1
    if name == "auto" and several:
        assert own is not None
        name = "parameter_server" if own.has_servers else "multi_worker_mirrored"
    elif name == "auto" and (request.tpu or not tpu.missing()):
        name = "tpu"
    if name == "auto":
        return name
    row = STRATEGIES[name]
    if row.processes and own is None:
        raise UsageError(
            f"runtime.strategy={name} runs in several processes, and TF_CONFIG does not name them: "
            f"start them by python -m ctl.launch --workers=2 {'--ps=1 ' * (name[0] == 'p')}-- ..., or "
            "choose runtime.strategy=auto."
        )
    if several and not row.processes:
        assert own is not None
        raise UsageError(
            f"runtime.strategy={name} runs in one process, and TF_CONFIG names {own.size}: choose "
            "runtime.strategy=auto, or unset TF_CONFIG."
        )
    if own is not None and own.has_servers != (name == "parameter_server") and row.processes:
        raise UsageError(
            f"runtime.strategy={name} does not go with TF_CONFIG, which names "
            f"{'some' if own.has_servers else 'no'} parameter servers: choose runtime.strategy=auto."
        )
    _check_accepted(name, row, request)
    return name


def _check_accepted(name: str, row: Row, request: Request) -> None:
    """Refuses what the strategy would not look at."""
    none = Request()
    for field, key in _KEYS.items():
        value = getattr(request, field)
        if value != getattr(none, field) and field not in row.accepts:
            raise UsageError(f"{key} has no effect with runtime.strategy={name}: leave it out.")
    if request.algorithm not in ("auto", *row.algorithms):
        raise UsageError(
            f"runtime.all_reduce.algorithm is {request.algorithm!r}, and runtime.strategy={name} has "
            f"{', '.join(('auto', *row.algorithms))}: choose one of them."
        )
    if request.packs > 1 and request.algorithm not in ("nccl", "hierarchical_copy"):
        raise UsageError(
            "runtime.all_reduce.packs has no effect but with runtime.all_reduce.algorithm=nccl or "
            "hierarchical_copy: choose one of them, or leave it at 1."
        )


def build(name: str = "auto", request: Request | None = None) -> Hardware:
    """Makes the strategy that a config names.

    Args:
        name: a row of the table, or "auto": by the cluster where there is one; mirrored over several
            GPUs or logical devices; else one device.
        request: what else is asked for.

    Returns:
        The strategy, its row's name, and why.

    Raises:
        UsageError: the devices cannot be had.
    """
    request = request or Request()
    automatic = name == "auto"
    name = resolve_name(name, request)
    if name != "auto" and STRATEGIES[name].processes:
        assert request.cluster is not None
        why = f"{request.cluster.name} of {request.cluster.size} processes"
        found: list[str] = []
    elif name == "tpu":
        found, why = [], "a TPU is named" if request.tpu else "a TPU is here"
    else:
        found, why = devices.select(request.devices, split=request.logical_devices, strategy=name)
    if name == "auto":
        name = "mirrored" if len(found) > 1 else "one_device"
        _check_accepted(name, STRATEGIES[name], request)
    row = STRATEGIES[name]
    strategy = row.build(found[:1] if row.takes == "one" else found, request)
    several = request.cluster if row.processes else None
    if name == "tpu":
        why += f": {tpu.topology(strategy)}"
    return Hardware(strategy, name, f"auto: {why}" if automatic else why, several)


def name_of(strategy: "tf.distribute.Strategy") -> str:
    """The table's row that a strategy is of, also of one made without the table."""
    import tensorflow as tf

    kinds = {
        tf.distribute.experimental.CentralStorageStrategy: "central_storage",
        tf.distribute.ParameterServerStrategy: "parameter_server",
        tf.distribute.TPUStrategy: "tpu",
        tf.distribute.MultiWorkerMirroredStrategy: "multi_worker_mirrored",
        tf.distribute.MirroredStrategy: "mirrored",
        tf.distribute.OneDeviceStrategy: "one_device",
    }
    return next((name for kind, name in kinds.items() if isinstance(strategy, kind)), "default")


def _resolver(own: Cluster) -> Any:
    import tensorflow as tf

    spec = tf.train.ClusterSpec({role: list(tasks) for role, tasks in own.addresses.items()})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=own.role, task_id=own.index, rpc_layer="grpc"
    )
