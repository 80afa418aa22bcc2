"""The table of strategies: what each one is for, how it is built, and which options it reads.

A new strategy is an entry of `STRATEGIES` and a module with the functions that the entry names.
`hardware.selection` chooses the entry for a config.
"""

from collections.abc import Mapping
import dataclasses
import operator
from typing import TYPE_CHECKING, Any

from ctl.hardware import load
from ctl.hardware.devices import replica_devices

if TYPE_CHECKING:
    import tensorflow as tf

    from ctl.hardware.cluster import Cluster

_KEYS = (
    "logical_devices", "devices", "all_reduce.algorithm", "all_reduce.bucket_mib",
    "all_reduce.timeout", "cluster.start_timeout", "cluster.heartbeat_timeout",
    "cluster.shard_mib", "tpu",
)  # fmt: skip
CONFIG_KEYS = {key.rpartition(".")[2]: key for key in _KEYS}  # field of StrategyOptions -> its key
ALGORITHMS = ("auto", "nccl", "ring", "hierarchical_copy", "one_device")


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """The options of `config.runtime` that strategies read, and the cluster.

    Attributes:
        logical_devices: number of logical devices to split the first GPU into, or the CPU of a
            machine without a GPU; 0 uses the devices of the machine as they are.
        devices: the devices to use, such as ("GPU:0", "GPU:2"); empty for all.
        algorithm: the all-reduce algorithm, one of `ALGORITHMS`.
        bucket_mib: processes reduce their gradients in packs, each of which ends as soon as it
            exceeds this number of MiB, beginning with the gradients of the last layer; 0 for packs of
            32 MiB, which are not made to be sent during the backward pass.
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
    cluster: "Cluster | None" = None

    @classmethod
    def from_config(cls, runtime: Any, environment: Mapping[str, str]) -> "StrategyOptions":
        """Reads the options from `config.runtime` and the cluster from environment variables."""
        values = {name: operator.attrgetter(key)(runtime) for name, key in CONFIG_KEYS.items()}
        values["devices"] = tuple(values["devices"])
        cluster = load("engines:from_environment")(environment)
        return cls(**values, cluster=cluster)


@dataclasses.dataclass(frozen=True)
class StrategySpec:
    """One entry of the table.

    Attributes:
        summary: the purpose, in a few words.
        type: the name of the class in `tf.distribute`; "" for TensorFlow's default strategy.
        builder: "module:function" of `ctl.hardware`, which has the arguments of `build`.
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
        checker: "module:function", options -> None, which raises a UsageError if the hardware of the
            strategy cannot be used; "" if it is always there.
        describer: "module:function", strategy -> what the hardware is; "" for nothing to add.
    """

    summary: str
    type: str
    builder: str
    scope: str
    reads: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    multi_process: bool = False
    coordinated: bool = False
    remote: bool = False
    central: bool = False
    io_device: str = ""
    tpu: bool = False
    checker: str = ""
    describer: str = ""

    def build(self, devices: list[str], options: StrategyOptions) -> Any:
        """Builds the strategy, a `tf.distribute.Strategy`."""
        return load(self.builder)(devices, options)

    @property
    def replica_values(self) -> bool:
        """Whether each replica holds variables, in which it can keep values of its own."""
        return not (self.central or self.remote)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A strategy, and why it was chosen.

    Attributes:
        strategy: the strategy.
        name: its name in `STRATEGIES`.
        reason: why this strategy and these devices were chosen, in a few words for the user.
        cluster: the processes of the run; None for a run of one process.
    """

    strategy: "tf.distribute.Strategy"
    name: str
    reason: str
    cluster: "Cluster | None" = None

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files that only one process may write."""
        return self.cluster is None or self.cluster.is_chief


def of_strategy(strategy: "tf.distribute.Strategy") -> Hardware:
    """Returns the hardware of a strategy that the user made, with the processes that it runs in."""
    name, cluster = strategy_name(strategy), None
    if STRATEGIES[name].multi_process:
        resolver = strategy.cluster_resolver
        addresses = resolver.cluster_spec().as_dict()
        addresses.pop("evaluator", None)
        if resolver.task_type in addresses:
            from ctl.hardware.cluster import Cluster

            cluster = Cluster(addresses, resolver.task_type, resolver.task_id or 0)
    return Hardware(strategy, name, "the user's own", cluster)


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


# fmt: off
STRATEGIES: dict[str, StrategySpec] = {
    "default": StrategySpec(
        "one replica without a strategy, on the device that TensorFlow chooses",
        "", "one_process:build_default", "own"),
    "one_device": StrategySpec(
        "one replica on the first GPU, or on the CPU",
        "OneDeviceStrategy", "one_process:build_one_device", "one",
        reads=("logical_devices", "devices")),
    "mirrored": StrategySpec(
        "one replica per device of this machine",
        "MirroredStrategy", "one_process:build_mirrored", "all",
        reads=("logical_devices", "devices", "algorithm"),
        algorithms=("nccl", "hierarchical_copy", "one_device")),
    "central_storage": StrategySpec(
        "one replica per device of this machine, with a single copy of the variables on the CPU",
        "experimental.CentralStorageStrategy", "one_process:build_central_storage", "all",
        reads=("logical_devices", "devices"), central=True),
    "multi_worker_mirrored": StrategySpec(
        "one replica per device of several processes, on one machine or more",
        "MultiWorkerMirroredStrategy", "several_processes:build_multi_worker_mirrored", "own",
        reads=("algorithm", "bucket_mib", "timeout", "start_timeout", "heartbeat_timeout"),
        algorithms=("nccl", "ring"), multi_process=True),
    "tpu": StrategySpec(
        "one replica per core of a TPU slice",
        "TPUStrategy", "tpu:build", "own",
        reads=("tpu",), remote=True, tpu=True, checker="tpu:check", describer="tpu:describe_topology",
        io_device="/job:localhost"),  # the hosts of a remote TPU have no disk of the run
    "parameter_server": StrategySpec(
        "workers that asynchronously update variables on parameter servers",
        "ParameterServerStrategy", "several_processes:build_parameter_server", "own",
        reads=("start_timeout", "shard_mib"),
        multi_process=True, coordinated=True, remote=True, central=True),
}
# fmt: on
NAMES = ("auto", *STRATEGIES)


def bucket_bytes(strategy: "tf.distribute.Strategy") -> int:
    """Returns the bytes above which a strategy ends a pack; 0 if it has no number of its own."""
    # Strategies of one process may have the attribute too, with the default value.
    options = getattr(strategy.extended, "_communication_options", None)
    return options.bytes_per_pack if options else 0
