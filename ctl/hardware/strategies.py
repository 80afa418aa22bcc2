"""config.runtime -> `tf.distribute.Strategy`: one table, a row a strategy.

Importing this loads no TensorFlow, so that a config can be checked by it.
"""

from collections.abc import Callable
import dataclasses
import subprocess
from typing import TYPE_CHECKING, Any

from ctl.errors import UsageError

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Row:
    """One strategy.

    Attributes:
        summary: what it is for, in a few words.
        build: (devices) -> strategy.
        devices: how many of the machine's devices it takes: "one" or "all".
    """

    summary: str
    build: Callable[[list[str]], Any]
    devices: str


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A strategy, and why it is the one.

    Attributes:
        strategy: the strategy.
        name: its row in the table.
        why: one line for the person who runs it.
    """

    strategy: "tf.distribute.Strategy"
    name: str
    why: str


def _one_device(devices: list[str]) -> "tf.distribute.Strategy":
    import tensorflow as tf

    return tf.distribute.OneDeviceStrategy(f"/{devices[0]}")


def _mirrored(devices: list[str]) -> "tf.distribute.Strategy":
    import tensorflow as tf

    # The default collectives abort when one process makes strategies of different sizes
    # ("joining a group with size 4, but that group has size 2"), as tests and notebooks do; between
    # devices that share a chip they gain nothing. NCCL stays the choice for physical GPUs.
    shared = devices[0].startswith("CPU") or len(tf.config.list_physical_devices("GPU")) < len(
        devices
    )
    reduction = tf.distribute.ReductionToOneDevice() if shared else None
    return tf.distribute.MirroredStrategy([f"/{d}" for d in devices], cross_device_ops=reduction)


STRATEGIES: dict[str, Row] = {
    "one_device": Row("one replica on the first GPU, or the CPU", _one_device, "one"),
    "mirrored": Row("a replica a device, of one machine", _mirrored, "all"),
}
NAMES = ("auto", *STRATEGIES)


def build(name: str = "auto", *, logical_devices: int = 0) -> Hardware:
    """Makes the strategy that a config names.

    Args:
        name: a row of the table, or "auto": mirrored over several GPUs or logical devices, else
            one device.
        logical_devices: split the first GPU, or the CPU where there is none, into so many devices;
            0 takes the machine's devices as they are (for `mirrored` with no GPU: 2).

    Returns:
        The strategy, its row's name, and why.

    Raises:
        UsageError: the devices cannot be had.
    """
    import tensorflow as tf

    if name not in NAMES:
        raise UsageError(f"There is no strategy {name!r}: choose one of {', '.join(NAMES)}.")
    gpus = tf.config.list_physical_devices("GPU")
    kind = "GPU" if gpus else "CPU"
    why = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)} here" if gpus else "no GPU here"
    if name == "mirrored" and not gpus and not logical_devices:
        logical_devices = 2
    if logical_devices:
        _split(tf.config.list_physical_devices(kind)[0], logical_devices)
    if logical_devices > 1:
        why += f", the {'first' if gpus else 'CPU'} split in {logical_devices}"
    found = [
        f"{d.device_type}:{d.name.rsplit(':', 1)[1]}" for d in tf.config.list_logical_devices(kind)
    ]
    found = found[: logical_devices or None]
    if name == "auto":
        name = "mirrored" if len(found) > 1 and (gpus or logical_devices) else "one_device"
        why = f"auto: {why}"
    row = STRATEGIES[name]
    return Hardware(row.build(found[:1] if row.devices == "one" else found), name, why)


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
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "-i", index]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return int(out.split()[0]) * 9 // 10
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        raise UsageError(
            "runtime.logical_devices needs the GPU's memory size, and nvidia-smi did not tell it: "
            "set runtime.logical_devices to 0."
        ) from None
