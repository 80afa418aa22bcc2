"""The names of devices, the devices of a strategy's replicas, and the peaks of GPUs."""

from collections.abc import Sequence
import re
from typing import TYPE_CHECKING, Any

from ctl.errors import UsageError

if TYPE_CHECKING:
    import tensorflow as tf


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


def replica_devices(strategy: "tf.distribute.Strategy") -> list[str]:
    """Returns the devices of the replicas of this process, such as "CPU:0"."""
    import tensorflow as tf

    try:
        names = strategy.extended.worker_devices
    except RuntimeError:  # the default strategy does not report its devices
        return ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]
    return [name.rsplit("device:", 1)[-1] for name in names]
