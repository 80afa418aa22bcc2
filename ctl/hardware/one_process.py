"""Builds the strategies of one process: on one device, or on several devices of this machine."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.hardware.strategies import StrategyOptions


def build_default(devices: list[str], options: StrategyOptions) -> Any:
    """Returns TensorFlow's default strategy: one replica."""
    return tf.distribute.get_strategy()  # outside of any scope: TensorFlow's default strategy


def build_one_device(devices: list[str], options: StrategyOptions) -> Any:
    """Builds a strategy of one replica on the first device."""
    return tf.distribute.OneDeviceStrategy(f"/{devices[0]}")


def build_mirrored(devices: list[str], options: StrategyOptions) -> Any:
    """Builds a strategy of one replica on each device."""
    # MirroredStrategy's default collectives abort when one process builds strategies of different
    # sizes, as tests and notebooks do ("joining a group with size 4, but that group has size 2").
    # Logical devices of one chip gain nothing from collectives, so those reduce on one device.
    # Between physical GPUs the default, NCCL, is the fastest.
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    share_chip = devices[0].startswith("CPU") or num_gpus < len(devices)
    cross_device_ops: Any = None
    if options.algorithm == "nccl":
        if share_chip:
            raise UsageError(
                "runtime.all_reduce.algorithm=nccl requires one physical GPU per replica, but the "
                f"replicas are on {', '.join(devices)}: set it to auto."
            )
        cross_device_ops = tf.distribute.NcclAllReduce()
    elif options.algorithm == "hierarchical_copy":
        cross_device_ops = tf.distribute.HierarchicalCopyAllReduce()
    elif options.algorithm == "one_device" or share_chip:
        cross_device_ops = tf.distribute.ReductionToOneDevice(accumulation_fn=_add_in_order)
    return tf.distribute.MirroredStrategy(
        [f"/{device}" for device in devices], cross_device_ops=cross_device_ops
    )


def build_central_storage(devices: list[str], options: StrategyOptions) -> Any:
    """Builds a strategy of one replica on each device, whose variables are on the CPU."""
    # The default of `parameter_device` is the CPU only if there are several compute devices.
    strategy = tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=[f"/{device}" for device in devices], parameter_device="/CPU:0"
    )
    # The constructor has no argument for it.
    strategy.extended._cross_device_ops.accumulation_fn = _add_in_order
    return strategy


def _add_in_order(values: Sequence[Any]) -> Any:
    """Returns the sum of the replicas' tensors, added in the order of the replicas.

    `tf.add_n` alone gives the sum of three or more tensors other last bits in some runs, because the
    order of its inputs is not fixed. Its kernel begins with the first input whose memory it may reuse,
    which depends on whether other operations that read the input have already run. `Snapshot` returns
    memory that no other operation reads. It copies its input only if another operation may still read
    it. The optimizer of graphs sorts the inputs of `add_n` by name, and without `Snapshot` it merges the
    sum of two replicas with a sum in one of them.
    """
    with tf.name_scope("add_in_order"):
        own = [
            tf.raw_ops.Snapshot(input=value, name=f"replica_{replica:06d}")
            for replica, value in enumerate(values)
        ]
        return tf.add_n(own)
