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


# Name of the device -> dtype -> dense 10^12 operations per second, without sparsity. From NVIDIA's data
# sheets of V100, A100, H100 and H200 (SXM). A device that is not listed has no known peak: the peak of
# a similar one would be wrong, as PCIe cards run at lower clocks under the same family name.
_AMPERE = {"float16": 312.0, "bfloat16": 312.0, "tensorfloat32": 156.0, "float32": 19.5}
_HOPPER = {"float16": 989.4, "bfloat16": 989.4, "tensorfloat32": 494.7, "float32": 66.9}
_VOLTA = {"float16": 125.0, "float32": 15.7}
_PEAKS = {
    "Tesla V100-SXM2-16GB": _VOLTA,
    "Tesla V100-SXM2-32GB": _VOLTA,
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H200": _HOPPER,
}


def peak_flops(device: str, compute_dtype: str) -> float | None:
    """Returns the peak of a device, in floating-point operations per second.

    Args:
        device: such as "GPU:0".
        compute_dtype: the dtype of matrix products.

    Returns:
        The peak; None if it is not known for exactly this device and dtype.
    """
    import tensorflow as tf

    kind, _, index = device.partition(":")
    devices = tf.config.list_physical_devices(kind)
    if kind != "GPU" or not index.isdecimal() or int(index) >= len(devices):
        return None
    details = tf.config.experimental.get_device_details(devices[int(index)])
    peaks = _PEAKS.get(details.get("device_name", ""), {})
    # TensorFlow multiplies float32 matrices in TensorFloat-32 on devices that have it.
    if compute_dtype == "float32" and tf.config.experimental.tensor_float_32_execution_enabled():
        compute_dtype = "tensorfloat32" if "tensorfloat32" in peaks else "float32"
    peak = peaks.get(compute_dtype)
    return 1e12 * peak if peak else None
