"""Chooses the strategy for a config: resolves "auto", checks the options, and builds the strategy."""

from collections.abc import Sequence

from ctl import errors
from ctl.errors import UsageError
from ctl.hardware import load
from ctl.hardware.cluster import Cluster
from ctl.hardware.strategies import CONFIG_KEYS, NAMES, STRATEGIES, Hardware, StrategyOptions

_DEFAULTS = StrategyOptions()


def resolve_name(name: str, options: StrategyOptions) -> str:
    """Resolves "auto" as far as is possible without TensorFlow, and checks the options.

    Args:
        name: a name of the table, or "auto".
        options: the options of the config.

    Returns:
        A name of the table; "auto" if the choice depends on the GPUs that TensorFlow detects.

    Raises:
        UsageError: the name, the options and the cluster do not fit together.
    """
    if name not in NAMES:
        raise UsageError(f"There is no strategy {name!r}: choose one of {', '.join(NAMES)}.")
    cluster = options.cluster
    # The cluster comes first: any other strategy would train a separate model in each process.
    if name == "auto" and cluster is not None and cluster.size > 1:
        name = "parameter_server" if cluster.has_servers else "multi_worker_mirrored"
    elif name == "auto" and (options.tpu or not load("tpu:find_obstacle")()):
        name = "tpu"
    if name == "auto":
        return name  # one_device or mirrored: the number of GPUs is not known without TensorFlow
    _check_cluster(name, cluster)
    _check_options(name, options)
    if STRATEGIES[name].checker:
        load(STRATEGIES[name].checker)(options)
    return name


def build(name: str, options: StrategyOptions = _DEFAULTS) -> Hardware:
    """Builds the strategy of a config.

    Args:
        name: a name of the table, or "auto": a strategy for the cluster if the run has several
            processes, else "tpu" if there is one, else "mirrored" over several GPUs or logical
            devices, else "one_device".
        options: the options of the config.

    Returns:
        The strategy, its name, and why it was chosen.

    Raises:
        UsageError: the options do not fit together, or the devices are not available.
    """
    requested = name
    name = resolve_name(name, options)
    selected: list[str] = []
    # Strategies over several processes, and TPUs, detect their devices themselves.
    if name != "auto" and STRATEGIES[name].multi_process:
        assert options.cluster is not None
        reason = f"{options.cluster.name} of {options.cluster.size} processes"
    elif name == "tpu":
        reason = "a TPU is configured" if options.tpu else "this machine has a TPU"
    else:
        selected, reason = select_devices(
            options.devices, split=options.logical_devices, strategy=name
        )
    if name == "auto":
        name = "mirrored" if len(selected) > 1 else "one_device"
        _check_options(name, options)  # resolve_name could not check them without the name
    spec = STRATEGIES[name]
    strategy = spec.build(selected[:1] if spec.scope == "one" else selected, options)
    if options.bucket_mib and strategy.num_replicas_in_sync == 1:
        raise UsageError(
            "runtime.all_reduce.bucket_mib has no effect on one replica, which reduces nothing: remove "
            "it."
        )
    if spec.describer:
        reason += f": {load(spec.describer)(strategy)}"
    if requested == "auto":  # the user did not choose this strategy
        reason = f"auto: {reason}"
    # A cluster of one process is dropped: it needs no collectives, and its process is the chief.
    cluster = options.cluster if spec.multi_process else None
    return Hardware(strategy, name, reason, cluster)


def select_devices(requested: Sequence[str], *, split: int, strategy: str) -> tuple[list[str], str]:
    """Selects the devices for a strategy, and splits them into logical devices first.

    Args:
        requested: runtime.devices; empty for all devices.
        split: runtime.logical_devices; 0 for no split.
        strategy: name of the strategy, or "auto".

    Returns:
        Names of the devices, such as "CPU:0", and the reason for the selection.

    Raises:
        UsageError: the devices are not available.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    reason = errors.count(len(gpus), "GPU") if gpus else "no GPU"
    device_type = requested[0].partition(":")[0] if requested else "GPU" if gpus else "CPU"
    setting = f"runtime.logical_devices is {split}"
    if strategy in ("mirrored", "central_storage") and device_type == "CPU" and not split:
        # TensorFlow treats all cores as one device. Two logical devices let these strategies run with
        # more than one replica on a machine without GPUs.
        split = 1 + max((int(name.partition(":")[2]) for name in requested), default=1)
        setting = f"runtime.strategy={strategy} splits the CPU into {split} devices"
    if split:
        load("device_memory:split")(tf.config.list_physical_devices(device_type)[0], split, setting)
    if split > 1:
        reason += f", {'first GPU' if gpus else 'CPU'} split into {split}"
    # This call initializes TensorFlow's devices: they cannot be split or limited afterwards.
    available = [
        f"{device.device_type}:{device.name.rsplit(':', 1)[1]}"
        for device in tf.config.list_logical_devices(device_type)
    ]
    if requested:
        for name in requested:
            if name not in available:
                hint = errors.did_you_mean(name, available) or f": there is no {device_type} here."
                raise UsageError(f"runtime.devices contains {name!r}{hint}")
        return list(requested), f"{', '.join(requested)} as configured"
    # An earlier call may have split the CPU; "auto" without a split still means a single device.
    count = 1 if strategy == "auto" and not gpus and not split else split or None
    return available[:count], reason


def _check_cluster(name: str, cluster: Cluster | None) -> None:
    """Raises UsageError if the strategy cannot run in the processes of the cluster."""
    if not STRATEGIES[name].multi_process:
        # A cluster of one process is ignored: some platforms set TF_CONFIG for every job.
        if cluster is not None and cluster.size > 1:
            raise UsageError(
                f"runtime.strategy={name} runs in one process, but this is one of {cluster.size} "
                "(`ctl devices` says why): set runtime.strategy=auto, or start one process."
            )
        return
    needs_servers = STRATEGIES[name].coordinated
    if cluster is None:
        servers = "--ps=1 " if needs_servers else ""
        raise UsageError(
            f"runtime.strategy={name} requires several processes, but TF_CONFIG is not set: start "
            f"them with ctl launch --workers=2 {servers}-- ..., or set "
            "runtime.strategy=auto."
        )
    if cluster.has_servers != needs_servers:
        raise UsageError(
            f"runtime.strategy={name} requires a cluster {'with' if needs_servers else 'without'} "
            f"parameter servers, but this run has {'some' if cluster.has_servers else 'none'}: set "
            "runtime.strategy=auto."
        )


def _check_options(name: str, options: StrategyOptions) -> None:
    """Raises UsageError for an option that the strategy would silently ignore."""
    spec = STRATEGIES[name]
    for field, key in CONFIG_KEYS.items():
        if getattr(options, field) != getattr(_DEFAULTS, field) and field not in spec.reads:
            raise UsageError(
                f"runtime.{key} has no effect with runtime.strategy={name}: remove it."
            )
    algorithms = ("auto", *spec.algorithms)
    if options.algorithm not in algorithms:
        raise UsageError(
            f"runtime.all_reduce.algorithm is {options.algorithm!r}, but runtime.strategy={name} "
            f"requires one of {', '.join(algorithms)}: set it to one of them."
        )
