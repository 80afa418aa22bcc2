"""The devices and the versions of a measurement."""

import importlib.metadata
import importlib.util
import platform

import tensorflow as tf

from benchmarks import results
from benchmarks.gpu.parts import Report
from ctl.hardware import gpu

_PACKAGES = ("tensorflow", "tensorflow-cpu", "tf-keras", "keras", "numpy")


def describe(report: Report) -> None:
    """Reports the devices, the driver and the versions of packages."""
    report("python", version=platform.python_version())
    report("host", **results.describe_host())
    found = {name: [*importlib.metadata.distributions(name=name)] for name in _PACKAGES}
    versions = {name: each[0].version for name, each in found.items() if each}
    report("packages", **{"tensorflow": tf.__version__, **versions})
    report("tensorflow build", **{k: str(v) for k, v in tf.sysconfig.get_build_info().items()})
    with report.attempt("driver"):
        report("driver", gpus=[str(each) for each in gpu.describe_gpus()])
    devices = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(device) for device in devices]
    report("tensorflow", gpus=[{k: str(v) for k, v in each.items()} for each in details])
    if not devices and not report.small:
        report("gpu", error="TensorFlow detects no GPU: every figure below is that of a CPU")
    for name in ("jax", "torch"):
        report(f"{name} in this Python", importable=importlib.util.find_spec(name) is not None)
