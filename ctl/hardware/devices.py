"""Which of this machine's GPUs or CPUs a strategy is built on. Importing this loads no TensorFlow."""

from collections.abc import Sequence
import re
import subprocess
from typing import TYPE_CHECKING, Any

from ctl import errors
from ctl.errors import UsageError
from ctl.hardware import gpu

if TYPE_CHECKING:
    import tensorflow as tf


def check_names(devices: Sequence[Any]) -> None:
    """Refuses what is no list of devices, whatever the machine has."""
    for device in devices:
        if not isinstance(device, str) or not re.fullmatch(r"(CPU|GPU):\d{1,3}", device):
            raise UsageError(f'runtime.devices has {device!r}, want names such as "GPU:0".')
    if len(set(devices)) < len(devices):
        raise UsageError("runtime.devices names a device twice: name it once.")
    if len({device[:3] for device in devices}) > 1:
        raise UsageError("runtime.devices mixes CPUs and GPUs: name one kind.")


def select(asked: Sequence[str], *, split: int, strategy: str) -> tuple[list[str], str]:
    """The devices that a strategy is built on, such as "CPU:0", and why these.

    Args:
        asked: those that the config names; empty for all.
        split: how many logical devices to make of the first; 0 for none.
        strategy: its row, or "auto".

    Raises:
        UsageError: the devices cannot be had.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    kind = "GPU" if gpus else "CPU"
    why = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)} here" if gpus else "no GPU here"
    if asked:
        kind = asked[0].partition(":")[0]
    if strategy in ("mirrored", "central_storage") and kind == "CPU" and not split:
        split = 1 + max((int(d.partition(":")[2]) for d in asked), default=1)
    if split:
        _split(tf.config.list_physical_devices(kind)[0], split)
    if split > 1:
        why += f", the {'first' if gpus else 'CPU'} split in {split}"
    every = [
        f"{d.device_type}:{d.name.rsplit(':', 1)[1]}" for d in tf.config.list_logical_devices(kind)
    ]
    if asked:
        return _named(asked, every), f"{', '.join(asked)} as configured"
    found = every[: split or None]
    return (found if gpus or split or strategy != "auto" else found[:1]), why


def replica_devices(strategy: "tf.distribute.Strategy") -> list[str]:
    """The devices that the replicas of this process are on, such as "CPU:0"."""
    import tensorflow as tf

    try:
        names = strategy.extended.worker_devices
    except RuntimeError:  # the default strategy does not say
        return ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]
    return [name.rsplit("device:", 1)[-1] for name in names]


def _named(asked: Sequence[str], every: Sequence[str]) -> list[str]:
    for device in asked:
        if device not in every:
            raise UsageError(f"runtime.devices has {device!r}{errors.did_you_mean(device, every)}")
    return list(asked)


def _split(device: Any, count: int) -> None:
    """Splits a physical device into logical ones, which TensorFlow allows before its first use."""
    import tensorflow as tf

    one = tf.config.LogicalDeviceConfiguration
    parts = [one()] * count
    if device.device_type == "GPU":
        parts = [one(memory_limit=_gpu_memory_mib(device) // count)] * count
    try:
        tf.config.set_logical_device_configuration(device, parts)
    except RuntimeError:
        found = len(tf.config.list_logical_devices(device.device_type))
        if found < count:
            raise UsageError(
                f"runtime.logical_devices is {count}, but TensorFlow has started already, with "
                f"{found} logical {device.device_type}{'s' * (found != 1)}: let nothing use it "
                "before the strategy is built, such as a tensor that the trainer's file makes when "
                "it is imported."
            ) from None


def _gpu_memory_mib(device: Any) -> int:
    """Memory to split, in MiB: nine tenths of what the driver says is there."""
    index = device.name.rsplit(":", 1)[1]
    visible = gpu.visible_gpus()
    if visible is not None and int(index) < len(visible):  # the driver counts those hidden too
        index = visible[int(index)]
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "-i", index]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return int(out.split()[0]) * 9 // 10
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        raise UsageError(
            "runtime.logical_devices needs the GPU's memory size, and nvidia-smi did not tell it: "
            "set runtime.logical_devices to 0."
        ) from None
