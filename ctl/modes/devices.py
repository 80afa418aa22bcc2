"""--mode=devices: prints the hardware of this machine, and the strategy of a config on it."""

from collections.abc import Mapping, Sequence
import contextlib
import os
from typing import Any

from ctl.errors import UsageError, align, count, print_line
from ctl.hardware import devices, engines, gpu, host, selection, strategies, tpu
from ctl.hardware.gpu import DriverGpu
from ctl.hardware.strategies import StrategyOptions
from ctl.modes import DONE, Arguments
from ctl.private import replaced

Row = tuple[str, str]
_XLA_VARIABLES = ("TF_XLA_FLAGS", "XLA_FLAGS")  # of TensorFlow's use of XLA, and of XLA itself
_INSTALL_GPU = 'pip install "ctl-tensorflow[gpu]"'


def show_devices(arguments: Arguments) -> int:
    """Prints the description; only the section `runtime` of the config has an effect."""
    if arguments.flags["replaced"]:
        print_line("\n".join(align(replaced.describe())))
    else:
        print_line(describe(arguments.config.runtime))
    return DONE


def describe(runtime: Any) -> str:
    """Describes the hardware of this machine and the strategy, without training or writing files.

    Args:
        runtime: the section `runtime` of a validated config.

    Returns:
        Aligned lines, each with a name and a description.
    """
    import tensorflow as tf

    physical = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(device) for device in physical]
    build = tf.sysconfig.get_build_info()
    rows = [
        *host.describe(),
        ("TensorFlow", describe_tensorflow(tf.__version__, build, os.environ)),
        *describe_gpus(details, gpu.describe_gpus(), build),
        ("TPU", describe_tpu()),
        ("engine", engines.describe(os.environ)),
        *_describe_strategy(runtime),
    ]
    return "\n".join(align(rows))


def describe_tensorflow(
    version: str, build: Mapping[str, Any], environment: Mapping[str, str]
) -> str:
    """Describes the build of TensorFlow, and the flags that XLA reads.

    Args:
        version: version of TensorFlow.
        build: the result of `tf.sysconfig.get_build_info`.
        environment: variables of this process.
    """
    if build.get("is_cuda_build"):
        kind = f"CUDA {build.get('cuda_version', '?')}, cuDNN {build.get('cudnn_version', '?')}"
    elif build.get("is_rocm_build"):
        kind = "ROCm"
    else:
        kind = "without CUDA"
    flags = [f"{name}={environment[name]}" for name in _XLA_VARIABLES if environment.get(name)]
    return ", ".join([version, kind, *(flags or ["no XLA flags in the environment"])])


def describe_gpus(
    details: Sequence[Mapping[str, Any]], driver_gpus: Sequence[DriverGpu], build: Mapping[str, Any]
) -> list[Row]:
    """Describes each GPU in a row; without a GPU the only row says why.

    Args:
        details: TensorFlow's details of each GPU that it detects.
        driver_gpus: the GPUs that the driver reports for this process.
        build: the result of `tf.sysconfig.get_build_info`.
    """
    if details:
        driver = driver_gpus[0].driver if driver_gpus else "unknown"
        return [
            (f"GPU {i}", f"{_describe_gpu(detail)}, driver {driver}")
            for i, detail in enumerate(details)
        ]
    if not driver_gpus:
        return [("GPUs", "none")]
    names = ", ".join(f"{each.name} (driver {each.driver})" for each in driver_gpus)
    reason = _find_reason(build)
    return [("GPUs", f"TensorFlow detects none, but the driver reports {names}: {reason}")]


def _find_reason(build: Mapping[str, Any]) -> str:
    """Says why TensorFlow does not detect the GPUs of the driver, and the command that helps."""
    if not build.get("is_cuda_build"):
        return f"this build does not support GPUs: {_INSTALL_GPU}"
    missing = gpu.find_missing_libraries(build)
    if missing:
        return f"it cannot load {', '.join(missing)}: {_INSTALL_GPU}"
    return "TF_CPP_MIN_LOG_LEVEL=0 prints the reason"


def describe_tpu() -> str:
    """Describes the TPU of this machine, or why it cannot be used."""
    chips, obstacle = tpu.list_chips(), tpu.find_obstacle()
    if not chips:
        return f"none: {obstacle}" if obstacle else "none"
    description = f"{len(chips)} x {chips[0]}"
    return f"{description}, which cannot be used: {obstacle}" if obstacle else description


def _describe_gpu(details: Mapping[str, Any]) -> str:
    name = details.get("device_name", "unknown name")
    capability = ".".join(str(n) for n in details.get("compute_capability", ())) or "unknown"
    memory = gpu.find_memory_mib(name)
    size = f"{memory / 1024:.1f} GiB" if memory else "unknown"
    return f"{name}, memory {size}, compute capability {capability}"


def _describe_strategy(runtime: Any) -> list[Row]:
    """Describes the strategy and the XLA mode of the config on this machine, with the reasons."""
    from ctl.compile import xla

    try:
        name = selection.resolve_name(
            runtime.strategy, StrategyOptions.from_config(runtime, os.environ)
        )
        # Building these would wait for other processes, or erase the memory of a TPU.
        spec = strategies.STRATEGIES.get(name)  # None for "auto"
        if spec and (spec.remote or spec.multi_process):
            return [("strategy", f"{name}: {spec.summary}")]
        hardware = _build_hardware(runtime)
    except UsageError as error:
        return [("strategy", f"{runtime.strategy} is not available: {error}")]
    replicas = hardware.strategy.num_replicas_in_sync
    mode, reason = xla.choose(
        runtime.xla,
        gpu=any("GPU" in device for device in devices.replica_devices(hardware.strategy)),
        replicas=replicas,
        sync_batch_norm=False,  # known only once the model is built
        shards=bool(runtime.logical_shards),
        deterministic=runtime.deterministic,
        strategy=hardware.name,
    )
    return [
        ("strategy", f"{hardware.name} ({hardware.reason}), {count(replicas, 'replica')}"),
        ("xla", f"{mode} ({reason}); depends on the model and the data too: see --mode=explain"),
    ]


def _build_hardware(runtime: Any) -> selection.Hardware:
    import tensorflow as tf

    if not runtime.logical_devices:
        # Without memory growth, this process would allocate the memory of GPUs that others train on.
        for device in tf.config.list_physical_devices("GPU"):
            with contextlib.suppress(RuntimeError):  # the config file has used TensorFlow already
                tf.config.experimental.set_memory_growth(device, True)
    return selection.build(runtime.strategy, StrategyOptions.from_config(runtime, os.environ))
