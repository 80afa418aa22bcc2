"""Strategies over logical devices: of the first GPU, or of the CPU on a machine without one."""

import tensorflow as tf

from ctl.hardware import selection
from ctl.hardware.strategies import StrategyOptions

GPU = bool(tf.config.list_physical_devices("GPU"))
KIND = "GPU" if GPU else "CPU"


def split(count: int) -> None:
    """Splits the device into logical devices; call it before TensorFlow uses a device."""
    selection.select_devices([], split=count, strategy="mirrored")


def make_strategy(replicas: int, *, kind: str = KIND) -> tf.distribute.Strategy:
    """Makes a strategy over the first logical devices of a kind."""
    names = tuple(f"{kind}:{i}" for i in range(replicas))
    name = "one_device" if replicas == 1 else "mirrored"
    return selection.build(name, StrategyOptions(devices=names)).strategy
