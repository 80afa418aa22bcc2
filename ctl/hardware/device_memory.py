"""Divides a device into logical devices, and reads how much memory TensorFlow may allocate on it.

TensorFlow fixes its logical devices and memory limits when it first uses a device, so they are
configured before the strategy is built.
"""

from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.hardware import gpu

_TOO_LATE_FIX = (
    "create no tensor before the strategy is built, for example while the trainer's file is "
    "imported."
)


def split(device: Any, count: int, reason: str) -> None:
    """Splits a physical device into logical devices, which share its memory equally.

    Args:
        device: the physical device.
        count: the number of logical devices.
        reason: the setting that requires them, for the message if it is too late.
    """
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
                f"{reason}, but TensorFlow has already initialized its devices with {existing} "
                f"{'logical ' * (existing > 1)}{device.device_type}{'s' * (existing != 1)}: "
                f"{_TOO_LATE_FIX}"
            ) from None


def gpu_memory_limit(name: str) -> int | None:
    """Returns the bytes that TensorFlow may allocate on a GPU; None for other devices, or if unknown.

    Args:
        name: a logical device, such as "GPU:0".
    """
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


def _usable_memory_mib(device: Any) -> int:
    """Returns 9/10 of the memory of a GPU in MiB: CUDA's context and libraries need the rest."""
    details = tf.config.experimental.get_device_details(device)
    memory = gpu.find_memory_mib(details.get("device_name", ""))
    if memory is None:
        raise UsageError(
            "runtime.logical_devices requires the size of the GPU's memory, which the NVIDIA driver "
            "does not report: set runtime.logical_devices to 0."
        )
    return memory * 9 // 10
