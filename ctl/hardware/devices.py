"""Selects and configures the GPUs or CPUs of this machine that a strategy uses.

TensorFlow fixes its logical devices and memory limits when it first uses a device, so they are
configured before the strategy is built.
"""

from collections.abc import Sequence
import re
from typing import TYPE_CHECKING, Any

from ctl import errors
from ctl.errors import UsageError
from ctl.hardware import gpu

if TYPE_CHECKING:
    import tensorflow as tf

_TOO_LATE_FIX = (
    "create no tensor before the strategy is built, for example while the trainer's file is "
    "imported."
)


def check_names(names: Sequence[Any]) -> None:
    """Checks runtime.devices, independently of the devices that the machine has.

    Raises:
        UsageError: the names are invalid.
    """
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"(CPU|GPU):\d{1,3}", name):
            raise UsageError(f'runtime.devices contains {name!r}: use names such as "GPU:0".')
    if len(set(names)) < len(names):
        raise UsageError("runtime.devices contains a device twice: remove one of them.")
    if len({name[:3] for name in names}) > 1:  # "CPU" or "GPU"
        raise UsageError("runtime.devices contains both CPUs and GPUs: use one kind.")


def select(requested: Sequence[str], *, split: int, strategy: str) -> tuple[list[str], str]:
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
    reason = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}" if gpus else "no GPU"
    device_type = requested[0].partition(":")[0] if requested else "GPU" if gpus else "CPU"
    if strategy in ("mirrored", "central_storage") and device_type == "CPU" and not split:
        # TensorFlow treats all cores as one device. Two logical devices let these strategies run with
        # more than one replica on a machine without GPUs.
        split = 1 + max((int(name.partition(":")[2]) for name in requested), default=1)
    if split:
        _split(tf.config.list_physical_devices(device_type)[0], split)
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


def replica_devices(strategy: "tf.distribute.Strategy") -> list[str]:
    """Returns the devices of the replicas of this process, such as "CPU:0"."""
    import tensorflow as tf

    try:
        names = strategy.extended.worker_devices
    except RuntimeError:  # the default strategy does not report its devices
        return ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]
    return [name.rsplit("device:", 1)[-1] for name in names]


def gpu_memory_limit(name: str) -> int | None:
    """Returns the bytes that TensorFlow may allocate on a GPU; None for other devices, or if unknown.

    Args:
        name: a logical device, such as "GPU:0".
    """
    import tensorflow as tf

    if not name.startswith("GPU"):
        return None
    # Logical devices are numbered across all physical ones, each of which may be split into several.
    limits = [
        (device, part)
        for device in tf.config.list_physical_devices("GPU")
        for part in tf.config.get_logical_device_configuration(device) or [None]
    ]
    device, part = limits[int(name.rpartition(":")[2])]
    limit = part.memory_limit if part else None
    try:
        return int(limit or _usable_memory_mib(device)) * 2**20
    except UsageError:  # the driver does not report the size
        return None


def _split(device: Any, count: int) -> None:
    """Splits a physical device into logical devices, which share its memory equally."""
    import tensorflow as tf

    # The user, or an earlier strategy, may have split the CPU into more: those parts stay.
    is_cpu = device.device_type == "CPU"
    if is_cpu and len(tf.config.get_logical_device_configuration(device) or []) >= count:
        return
    memory_limit = _usable_memory_mib(device) // count if device.device_type == "GPU" else None
    parts = [tf.config.LogicalDeviceConfiguration(memory_limit=memory_limit)] * count
    try:
        tf.config.set_logical_device_configuration(device, parts)
    except RuntimeError:
        # A process that built a strategy before, such as a test, may have enough of them already.
        existing = len(tf.config.list_logical_devices(device.device_type))
        if existing < count:
            raise UsageError(
                f"runtime.logical_devices is {count}, but TensorFlow has already initialized its "
                f"devices with {existing} logical {device.device_type}{'s' * (existing != 1)}: "
                f"{_TOO_LATE_FIX}"
            ) from None


def _usable_memory_mib(device: Any) -> int:
    """Returns 9/10 of the memory of a GPU in MiB: CUDA's context and libraries need the rest."""
    import tensorflow as tf

    details = tf.config.experimental.get_device_details(device)
    memory = gpu.find_memory_mib(details.get("device_name", ""))
    if memory is None:
        raise UsageError(
            "runtime.logical_devices requires the size of the GPU's memory, which the NVIDIA driver "
            "does not report: set runtime.logical_devices to 0."
        )
    return memory * 9 // 10
