"""Several replicas on any machine: the CPU split into logical devices."""

import tensorflow as tf

from ctl.errors import UsageError
from ctl.hardware import selection
from ctl.hardware.strategies import StrategyOptions


def split_cpu(count: int = 4) -> list[str]:
    """Splits the CPU into logical devices, which must be done before TensorFlow is used.

        # conftest.py
        ctl.testing.split_cpu(4)

    Args:
        count: how many are wanted; there may be more already.

    Returns:
        Their names, such as "CPU:0".

    Raises:
        UsageError: TensorFlow has started with fewer.
    """
    there = logical_cpus()
    if there < count:
        try:
            tf.config.set_logical_device_configuration(
                tf.config.list_physical_devices("CPU")[0],
                [tf.config.LogicalDeviceConfiguration()] * count,
            )
        except RuntimeError:
            raise UsageError(
                f"TensorFlow has started already, with {max(there, 1)} logical CPU"
                f"{'s' * (there > 1)} and not {count}: call ctl.testing.split_cpu({count}) in "
                "conftest.py, before any test uses it."
            ) from None
    return [f"CPU:{i}" for i in range(count)]


def logical_cpus() -> int:
    """How many parts the CPU was split into, without starting TensorFlow; 0 if it was not."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    return len(tf.config.get_logical_device_configuration(cpu) or [])


def make_strategy(replicas: int) -> tf.distribute.Strategy:
    """Makes a strategy with a number of replicas on this machine's CPU.

        strategy = ctl.testing.make_strategy(4)

    Args:
        replicas: 1 for a `OneDeviceStrategy`; more for a `MirroredStrategy` over logical CPUs,
            which `split_cpu` must have made.

    Returns:
        The strategy.
    """
    name = "one_device" if replicas == 1 else "mirrored"
    devices = tuple(f"CPU:{i}" for i in range(replicas))
    return selection.build(name, StrategyOptions(devices=devices)).strategy
