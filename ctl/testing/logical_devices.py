"""Creates several replicas on any machine by splitting the CPU into logical devices."""

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.hardware import selection
from ctl.hardware.strategies import StrategyOptions


def split_cpu(count: int = 4) -> list[str]:
    """Splits the CPU into logical devices. Call it before TensorFlow is used.

        # conftest.py
        ctl.testing.split_cpu(4)

    Args:
        count: required number of logical devices; more may exist already.

    Returns:
        The names of the first `count`, such as "CPU:0".

    Raises:
        UsageError: TensorFlow is already initialized with fewer devices.
    """
    existing = count_logical_cpus()
    if existing < count:
        try:
            tf.config.set_logical_device_configuration(
                tf.config.list_physical_devices("CPU")[0],
                [tf.config.LogicalDeviceConfiguration()] * count,
            )
        except RuntimeError:
            raise UsageError(
                f"TensorFlow is already initialized with {max(existing, 1)} logical CPU"
                f"{'s' * (existing > 1)}, but {count} are required: call ctl.testing.split_cpu({count}) "
                "in conftest.py, before any test uses TensorFlow."
            ) from None
    return [f"CPU:{i}" for i in range(count)]


def count_logical_cpus() -> int:
    """Returns the number of logical devices of the CPU, 0 if it was not split.

    This does not initialize TensorFlow's devices.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    return len(tf.config.get_logical_device_configuration(cpu) or [])


def make_strategy(replicas: int) -> tf.distribute.Strategy:
    """Makes a strategy with a number of replicas on this machine's CPU.

        strategy = ctl.testing.make_strategy(4)

    Args:
        replicas: 1 for a `OneDeviceStrategy`; more for a `MirroredStrategy` over logical CPUs,
            which `split_cpu` must have made.
    """
    if replicas < 1:
        raise UsageError(f"replicas is {replicas}, but must be at least 1.")
    name = "one_device" if replicas == 1 else "mirrored"
    devices = tuple(f"CPU:{i}" for i in range(replicas))
    return selection.build(name, StrategyOptions(devices=devices)).strategy


def copies(strategy: tf.distribute.Strategy, variable: tf.Variable) -> list[np.ndarray]:
    """Returns each replica's copy of a variable.

        first, *others = ctl.testing.copies(trainer.strategy, trainer.model.variables[0])

    Args:
        strategy: the strategy under whose scope the variable was created.
        variable: the variable.

    Returns:
        One array per replica of this process.
    """
    return [np.asarray(v) for v in strategy.experimental_local_results(variable)]
